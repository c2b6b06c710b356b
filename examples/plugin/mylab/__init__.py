"""Components of a lab for fedssl, one module for each kind. Their settings are in ``../conf``."""
