"""Data sets from the Hugging Face Hub, local files, an image folder or a package."""
