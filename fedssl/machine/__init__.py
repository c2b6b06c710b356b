"""The machine a process runs on: its device, its threads and its memory."""
