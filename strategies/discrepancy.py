"""How far the clients of a round are from their average, layer by layer: the d_l of FedLAMA, see `strategies.euc`.

The squares need one number per layer beside the sum: mean ||avg - x_k||^2 = mean ||x_k - g||^2 - ||avg - g||^2.
"""

import numpy as np

from fedssl.arrays import TILE, Cosines, Layers, ReferenceLayers, is_weight
from fedssl.wire.messages import ClientUpdate
from strategies.weighted_sum import WeightedSum


def is_deferrable(name: str, array: np.ndarray) -> bool:
    """Whether a layer may be averaged every phi rounds: a weight, but no bias and no part of a normalisation."""
    return is_weight(name, array) and array.ndim >= 2


class DiscrepancySum:
    """A weighted sum that also measures how far the clients are from the average, layer by layer.

    Parameters
    ----------
    inner : WeightedSum
        The sum. The mean of the squares has its weights, as the identity of the module asks for.

    Attributes
    ----------
    discrepancy : dict of str to float
        For every layer that can wait, the mean over clients of the squared distance from the average.
    """

    def __init__(self, inner: WeightedSum) -> None:
        self._sum = inner

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Metrics that every client must report."""
        return self._sum.required_metrics

    def start(self, global_layers: ReferenceLayers) -> None:
        """Begin a round."""
        self._global = global_layers
        self._squares = {name: 0.0 for name, array in global_layers.layers.items() if is_deferrable(name, array)}
        self._weights = 0.0
        self._sum.start(global_layers)

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Fold in one update that passed `ReferenceLayers.check`."""
        self._sum.add(update, cosines)
        weight = update.num_examples if self._sum.weighting == "examples" else 1
        assert weight is not None  # the sum has refused updates without it
        for name, distance in self._distances(update.layers).items():
            self._squares[name] += weight * distance
        self._weights += weight

    def finish(self) -> Layers:
        """Return the average; ``discrepancy`` is that of the round from now on."""
        average = self._sum.finish()
        moved = self._distances(average)
        self.discrepancy = {
            name: max(square / self._weights - moved[name], 0.0)  # rounding may leave less than nothing
            for name, square in self._squares.items()
        }
        return average

    def _distances(self, layers: Layers) -> dict[str, float]:
        """||x - g||^2 of every layer that can wait."""
        found = dict.fromkeys(self._squares, 0.0)

        def measure(name: str) -> None:
            if name in found:
                found[name] = square_distance(layers[name], self._global.layers[name])

        self._global.parallel_for(measure)
        return found


def square_distance(x: np.ndarray, g: np.ndarray) -> float:
    """||x - g||^2, subtracted first and summed in float64."""
    x, g = x.reshape(-1), g.reshape(-1)
    total = 0.0
    for start in range(0, len(x), TILE):
        tile = slice(start, start + TILE)
        difference = np.subtract(x[tile], g[tile], dtype=np.float64)
        total += float(np.square(difference, out=difference).sum())
    return total
