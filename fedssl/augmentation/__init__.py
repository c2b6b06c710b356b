"""Two random views of every picture of a batch."""

from fedssl.augmentation.views import Augmentation

__all__ = ["Augmentation"]
