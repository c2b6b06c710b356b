"""Hardware of a process: its device, threads and memory."""
