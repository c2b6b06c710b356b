"""Two random views of every image of a batch."""

from fedssl.augmentation.augmentation import Augmentation

__all__ = ["Augmentation"]
