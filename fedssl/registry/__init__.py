"""The runs that lie in folders: which there are, which are best, and what one was."""
