"""Optimizers of local training besides those of torch."""
