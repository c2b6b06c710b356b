"""Evaluation of encoders: protocols with labels, and measures of collapse without labels."""
