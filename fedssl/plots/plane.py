"""A plane through the models of some rounds: that of Li et al. (NeurIPS 2018, section 7.2)."""

from dataclasses import dataclass

import numpy as np

_BLOCK = 2**20  # weights at a time


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane in the space of weights.

    Attributes
    ----------
    origin : ndarray
        ``(weights,)``.
    directions : ndarray
        ``(2, weights)``, of length 1 and at a right angle.
    shares : tuple of float
        How much of the squared deviations lies along either direction, in [0, 1].
    """

    origin: np.ndarray
    directions: np.ndarray
    shares: tuple[float, float]

    def coordinates(self, weights: np.ndarray) -> np.ndarray:
        """Coordinates ``(n, 2)`` of the points of the plane that are nearest to models ``(n, weights)``."""
        found: np.ndarray = (weights - self.origin) @ self.directions.T
        return found

    def weights(self, x: float, y: float) -> np.ndarray:
        """The model at a point of the plane, ``(weights,)``."""
        moved: np.ndarray = self.origin + x * self.directions[0] + y * self.directions[1]
        return moved


def principal_plane(models: np.ndarray) -> Plane:
    """The plane through the last model along the principal directions of all deviations from it.

    Parameters
    ----------
    models : ndarray
        ``(n, weights)``.

    Returns
    -------
    Plane
        A direction is turned so that the model that lies farthest along it does so on its positive side.

    Raises
    ------
    ValueError
        The models lie on a line.
    """
    deviations = models - models[-1]
    squares, mixes = np.linalg.eigh(_products(deviations))  # n x n, however many weights
    squares, mixes = squares[::-1][:2], mixes[:, ::-1][:, :2]
    if len(squares) < 2 or squares[1] <= 1e-9 * squares[0]:
        raise ValueError("the models lie on a line")
    mixes = mixes * np.sign(mixes[np.abs(mixes).argmax(axis=0), [0, 1]])
    directions = (mixes / np.sqrt(squares)).T.astype(models.dtype) @ deviations
    total = float(np.sum(np.square(deviations, dtype=np.float64)))
    return Plane(models[-1], directions, (float(squares[0]) / total, float(squares[1]) / total))


def _products(deviations: np.ndarray) -> np.ndarray:
    """Inner products ``(n, n)``, float64: in float32 their rounding would make a plane of models on a line."""
    products: np.ndarray = np.zeros((len(deviations),) * 2)
    for start in range(0, deviations.shape[1], _BLOCK):  # never a float64 copy of all weights
        block = deviations[:, start : start + _BLOCK].astype(np.float64)
        products += block @ block.T
    return products


def axes_around(coordinates: np.ndarray, *, points: int, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates ``(points,)`` along either direction that leave a margin around the places ``(n, 2)``.

    The margin is a share of the extent along that direction.
    """
    low, high = coordinates.min(axis=0), coordinates.max(axis=0)
    pad = margin * (high - low)
    x, y = (np.linspace(*ends, points) for ends in zip(low - pad, high + pad, strict=True))
    return x, y
