"""Public name of `strategies.loss_weighted`."""

from strategies.loss_weighted import loss_weighted

__all__ = ["loss_weighted"]
