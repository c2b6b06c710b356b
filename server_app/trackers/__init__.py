"""Experiment trackers, one per file: where a run's settings and numbers go beside its folder."""
