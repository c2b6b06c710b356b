"""Experiment trackers, one per file. They log a run's settings and metrics in addition to its folder."""
