"""A page to look at images by the representations of an encoder; see `fedssl.explore.cli`."""
