"""Who holds what, in a simulation; what devices hold nobody else knows."""

from dataclasses import dataclass

import numpy as np

from fedssl.datasets.base import ImageData
from fedssl.partition import Partition


@dataclass(frozen=True)
class ClientData:
    """Images and their owners.

    Attributes
    ----------
    image_data : ImageData
        Of all clients together.
    partition : Partition
        The images of each client, and by what they were divided.
    """

    image_data: ImageData
    partition: Partition

    @property
    def parts(self) -> list[np.ndarray]:
        """The images of each client."""
        return self.partition.client_indices
