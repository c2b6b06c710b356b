"""Initial weights of the encoder from other training runs: reading, renaming, adapting and strict loading."""
