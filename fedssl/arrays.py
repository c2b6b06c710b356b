"""Layers: the named arrays of a model, as they travel between clients and server, and the angles between them.

A *layer* is one named array of a ``state_dict`` (the reading of "layer" in the code of L-DAWA's authors). Three kinds
are told apart by name and dtype: weights (what an optimizer changes), statistics (running mean and variance of a
normalization layer) and counters (integers, such as ``num_batches_tracked``).

The cosine of a client's layer with the global one is Eq. 2 of L-DAWA (Rehman et al., ICCV 2023). Products are summed
in float32 by BLAS over rows of `ROW` numbers and in float64 across rows (relative error about 1e-7; one float32 sum
over a layer of millions of numbers errs by 1e-5 and more). One thread works on a whole layer, and OpenBLAS, which the
wheels of NumPy contain, multiplies up to 10,000 numbers on one thread: results do not depend on the number of threads.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedssl.errors import InputError

Layers = dict[str, np.ndarray]

STATISTICS = ("running_mean", "running_var")

ROW = 1 << 10  # numbers in one BLAS product

# Numbers worked on at a time. What several operations or clients share stays in the cache meanwhile, so that memory is
# read once. With 500 rows and less NumPy does not let other threads run.
TILE = 512 * ROW

_NUMBERS_PER_THREAD = 1 << 20
_SMALLEST_SQUARE = 1e-30
_SHORTEST_WAY = 1e-3  # of two vectors of length 1; squares that are exact to 1e-7 tell no shorter one apart
# No trained layer comes near; products of larger ones would leave the range of float32 after few layers.
_LARGEST_SQUARE = 1e20


def is_weight(name: str, array: np.ndarray) -> bool:
    """Whether the layer is a floating-point weight, i.e. neither a running statistic nor a counter."""
    return array.dtype.kind == "f" and name.rpartition(".")[2] not in STATISTICS


def inner_products(clients: Sequence[np.ndarray], g: np.ndarray) -> list[tuple[float, float]]:
    """The inner products w.g and w.w for every array w of ``clients``, floating-point and shaped like ``g``.

    w.w is finite exactly if every number of w is (for float64: unless it overflows).
    """
    clients, g = [w.reshape(-1) for w in clients], g.reshape(-1)
    found = _inner_products(clients, g, np.result_type(np.float32, g, *clients))
    for position, (wg, ww) in enumerate(found):
        if not (_SMALLEST_SQUARE < ww < math.inf and abs(wg) < math.inf):
            # Squares left the range of float32, or w is zero.
            found[position] = _inner_products([clients[position]], g, np.dtype(np.float64))[0]
    return found


def cosine(wg: float, ww: float, gg: float) -> float:
    """Cosine from w.g, w.w and g.g: at most 1, and 1 where one side is zero (fresh biases), i.e. a plain average."""
    scale = math.sqrt(ww * gg)
    return min(wg / scale, 1.0) if scale else 1.0  # Eq. 2


@dataclass(frozen=True, kw_only=True)
class Cosines:
    """How one client's layers point relative to those it started from.

    Attributes
    ----------
    weights : dict of str to float
        Cosine of every weight, in [-1, 1]; 1: same direction.
    statistics : dict of str to float
        The same for running statistics.
    model : float
        Cosine of all weights as one vector.
    first_invalid : str or None
        First layer that holds NaN or an infinite value.
    mean : float or None
        Mean cosine of the weights, each counted by how many numbers it holds. Weights that are all zero in what the
        client started from (fresh biases) point nowhere and are left out; None: there are no others.
    relative_change : tuple of float
        How far the weights and the running statistics, each as one vector, are from where they started, as a multiple
        of the length of that start. Shorter ways than 1e-3 are not told apart.
    """

    weights: dict[str, float]
    statistics: dict[str, float]
    model: float
    first_invalid: str | None
    mean: float | None = None
    relative_change: tuple[float, float] = (0.0, 0.0)

    @property
    def finite(self) -> bool:
        """Whether every value of the client is finite."""
        return self.first_invalid is None


class ReferenceLayers:
    """The layers that clients start a round from, to which their updates are compared."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self._weights = {name for name, array in layers.items() if is_weight(name, array)}
        self._by_size = sorted(layers, key=lambda name: layers[name].size, reverse=True)

    @cached_property
    def _squares(self) -> dict[str, float]:
        return {name: ww for name, (_, ww) in self._measure([self.layers])[0].items()}

    def check(self, layers: Layers) -> None:
        """Compare names, shapes and dtypes with the global layers.

        Raises
        ------
        InputError
            A layer is missing, was not asked for, or has another shape or dtype.
        """
        for name, array in self.layers.items():
            if name not in layers:
                raise InputError(f"layer {name} is missing")
            other = layers[name]
            if other.shape != array.shape:
                raise InputError(f"layer {name} has shape {other.shape} instead of {array.shape}")
            if other.dtype != array.dtype:
                raise InputError(f"layer {name} has dtype {other.dtype} instead of {array.dtype}")
        if len(layers) > len(self.layers):
            unknown = next(name for name in layers if name not in self.layers)
            raise InputError(f"layer {unknown} is not part of the global model")

    def cosines_of(self, layers: Layers) -> Cosines:
        """Cosines of a client's layers, which passed `check`; reads every array once."""
        return self.cosines_of_all([layers])[0]

    def cosines_of_all(self, clients: Sequence[Layers]) -> list[Cosines]:
        """`cosines_of` for several clients, with the same bits; reads the global layers once for all."""
        return [self._cosines(measured) for measured in self._measure(clients)]

    def parallel_for(self, work: Callable[[str], None]) -> None:
        """Call ``work(name)`` for every layer, the largest first, on as many threads as torch may use.

        NumPy and torch let go of the interpreter while they compute. Threads take layers from one list, so a core that
        is busy with something else delays nobody; within ``work`` torch itself stays on one thread, because its own
        threads wait for each other and cut an array where it suits their number.
        """
        todo = iter(self._by_size)

        def take() -> None:
            for name in todo:
                work(name)

        numbers = sum(array.size for array in self.layers.values())
        threads = torch.get_num_threads()
        others = min(threads - 1, numbers // _NUMBERS_PER_THREAD)
        torch.set_num_threads(1)  # new threads take this over
        try:
            with ThreadPoolExecutor(max(others, 1)) as pool:
                running = [pool.submit(take) for _ in range(others)]
                take()
                for thread in running:
                    thread.result()
        finally:
            torch.set_num_threads(threads)

    def _measure(self, clients: Sequence[Layers]) -> list[dict[str, tuple[float, float]]]:
        """For every client w.g and w.w of the floating-point layers, in the order of the global layers."""
        floats = dict.fromkeys(name for name, array in self.layers.items() if array.dtype.kind == "f")
        found: list[dict[str, tuple[float, float]]] = [dict.fromkeys(floats, (0.0, 0.0)) for _ in clients]

        def measure(name: str) -> None:
            if name in floats:
                arrays = [layers[name] for layers in clients]
                for measured, pair in zip(found, inner_products(arrays, self.layers[name]), strict=True):
                    measured[name] = pair

        self.parallel_for(measure)
        return found

    def _cosines(self, measured: dict[str, tuple[float, float]]) -> Cosines:
        weights, statistics = {}, {}
        model_wg = model_ww = model_gg = 0.0
        buffers_way = buffers_gg = 0.0
        total, numbers = 0.0, 0
        for name, (wg, ww) in measured.items():
            gg = self._squares[name]
            if name in self._weights:
                weights[name] = cosine(wg, ww, gg)
                model_wg, model_ww, model_gg = model_wg + wg, model_ww + ww, model_gg + gg
                if gg:
                    size = self.layers[name].size
                    total, numbers = total + size * weights[name], numbers + size
            else:
                statistics[name] = cosine(wg, ww, gg)
                buffers_way, buffers_gg = buffers_way + ww - 2 * wg + gg, buffers_gg + gg
        return Cosines(
            weights=weights,
            statistics=statistics,
            model=cosine(model_wg, model_ww, model_gg),
            first_invalid=next((name for name, (_, ww) in measured.items() if not ww < _LARGEST_SQUARE), None),
            mean=total / numbers if numbers else None,
            relative_change=(
                _relative(model_ww - 2 * model_wg + model_gg, model_gg),
                _relative(buffers_way, buffers_gg),
            ),
        )


def _relative(square: float, of: float) -> float:
    """The length of a vector, by its square, as a multiple of another's; by float32 products no better than to 1e-3."""
    if not math.isfinite(square):
        return math.inf
    return max(math.sqrt(max(square, 0.0) / of), _SHORTEST_WAY) if of else _SHORTEST_WAY if square <= 0 else math.inf


def _inner_products(clients: Sequence[np.ndarray], g: np.ndarray, dtype: np.dtype) -> list[tuple[float, float]]:
    rows = g.size // ROW
    end = rows * ROW
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = g[end:].astype(dtype, copy=False)
        rests = [w[end:].astype(dtype, copy=False) for w in clients]
        found = [(float(x @ y), float(x @ x)) for x in rests]
        if not rows:
            return found
        g = g[:end].reshape(rows, ROW)
        clients = [w[:end].reshape(rows, ROW) for w in clients]
        sums = np.empty((len(clients), 2, rows), dtype)
        for start in range(0, rows, TILE // ROW):
            tile = slice(start, start + TILE // ROW)
            y = g[tile].astype(dtype, copy=False)
            for w, (wg, ww) in zip(clients, sums, strict=True):
                x = w[tile].astype(dtype, copy=False)
                np.vecdot(x, y, out=wg[tile])
                np.vecdot(x, x, out=ww[tile])
        whole = sums.sum(axis=2, dtype=np.float64).tolist()
    return [(wg + rest_wg, ww + rest_ww) for (wg, ww), (rest_wg, rest_ww) in zip(whole, found, strict=True)]
