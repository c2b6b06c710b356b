"""Data sets: images in memory from the Hugging Face Hub, local files, a folder or a package."""
