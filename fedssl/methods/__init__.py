"""Self-supervised methods, one per file. ``conf/method/`` describes their settings."""
