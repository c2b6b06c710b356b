"""Who holds what, in a simulation; what devices hold nobody else knows."""

from dataclasses import dataclass

import numpy as np

from fedssl.datasets.base import Pictures
from fedssl.partition import Division


@dataclass(frozen=True)
class Held:
    """Pictures and their owners.

    Attributes
    ----------
    pictures : Pictures
        Of all clients together.
    division : Division
        The pictures of each client, and by what they were divided.
    """

    pictures: Pictures
    division: Division

    @property
    def parts(self) -> list[np.ndarray]:
        """The pictures of each client."""
        return self.division.parts
