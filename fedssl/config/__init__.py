"""Settings: the overrides of a command line composed with ``conf/``, validated, and handed on as typed values."""
