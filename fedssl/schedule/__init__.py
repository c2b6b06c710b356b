"""Schedules: which stages of the encoder are trained in which round, and at which learning rate."""
