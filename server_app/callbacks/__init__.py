"""Callbacks that record or monitor a run."""
