"""Two random views of every picture of a batch."""

from fedssl.augmentation.augmentation import Augmentation

__all__ = ["Augmentation"]
