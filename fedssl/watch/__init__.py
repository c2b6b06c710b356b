"""The live view of runs: their folders, read while they are written, as a page of a local server."""
