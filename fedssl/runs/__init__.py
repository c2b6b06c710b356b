"""The run folder as a format: reading it, finding runs, and what it keeps of models."""
