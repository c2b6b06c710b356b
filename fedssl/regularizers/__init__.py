"""Regularizers: terms added to the local loss of any method. ``conf/regularizer/`` describes their settings."""
