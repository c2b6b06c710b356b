"""Random views of each image of a batch."""

from fedssl.augmentation.augmentation import Augmentation

__all__ = ["Augmentation"]
