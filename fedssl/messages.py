"""The messages of a round, by their public path: ``from fedssl.messages import ClientUpdate, TrainPlan``."""

from fedssl.wire.messages import ClientUpdate, TrainPlan

__all__ = ["ClientUpdate", "TrainPlan"]
