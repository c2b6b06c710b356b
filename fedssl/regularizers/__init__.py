"""Regularizers: terms that are added to the local loss of any method."""
