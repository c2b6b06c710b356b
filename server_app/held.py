"""Who holds what, in a simulation; what devices hold nobody else knows."""

from dataclasses import dataclass

import numpy as np

from fedssl.datasets.base import Pictures


@dataclass(frozen=True)
class Held:
    """Pictures and their owners.

    Attributes
    ----------
    pictures : Pictures
        Of all clients together.
    parts : list of ndarray
        The pictures of each client.
    """

    pictures: Pictures
    parts: list[np.ndarray]
