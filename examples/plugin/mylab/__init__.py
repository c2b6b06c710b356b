"""A lab's own parts for fedssl: one module for each kind of part; the settings are in ``../conf``."""
