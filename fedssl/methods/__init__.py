"""Self-supervised methods, one per file."""
