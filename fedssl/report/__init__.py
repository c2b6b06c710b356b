"""Tables and figures of runs, from what their folders hold."""
