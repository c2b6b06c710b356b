"""Layers: named arrays of a model, as exchanged between clients and server, and the cosines between them.

A *layer* is one named array of a ``state_dict`` (as in the code of L-DAWA's authors). Name and dtype distinguish three
kinds: weights (changed by an optimizer), statistics (running mean and variance of a normalization layer) and counters
(integers, such as ``num_batches_tracked``).

The cosine of a client's layer with the global one is Eq. 2 of L-DAWA (Rehman et al., ICCV 2023). Products are summed in
float32 by BLAS over rows of `BLAS_ROW` numbers and in float64 across rows (relative error about 1e-7; one float32 sum
over a layer of millions of numbers has an error of 1e-5 and more). One thread processes a whole layer, and OpenBLAS,
which NumPy's wheels contain, multiplies up to 10,000 numbers on one thread. Results therefore do not depend on the
number of threads.

Two layers may be factors of a product that is added to a weight (LoRA, `fedssl.low_rank_products`). They are exchanged,
summed and stored like other layers. Their cosine, however, is that of the product, under the name of the weight.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedssl.errors import InputError
from fedssl.low_rank_products import NO_PAIRS, FactorPairs, LowRank, deviation_products, stack

Layers = dict[str, np.ndarray]

VARIANCE = "running_var"  # ends the names of running variances
STATISTICS = ("running_mean", VARIANCE)

BLAS_ROW = 1 << 10  # numbers in one BLAS product

# Numbers per block. Data shared by several operations or clients stays in the cache, so that memory is read once. With
# 500 rows or fewer NumPy does not release the interpreter lock.
CACHE_TILE = 512 * BLAS_ROW

_NUMBERS_PER_THREAD = 1 << 20
_SMALL_LAYER = 1 << 16  # numbers; a call with fewer takes about as long as waiting for the interpreter lock
_SMALLEST_SQUARE = 1e-30
_MIN_CHANGE = 1e-3  # resolution of the distance of unit vectors whose squares are exact to 1e-7
# Far above any trained layer; products of larger ones would exceed the range of float32 after few layers.
_LARGEST_SQUARE = 1e20


def is_weight(name: str, array: np.ndarray) -> bool:
    """Return whether the layer is a floating-point weight, i.e. neither a running statistic nor a counter."""
    return array.dtype.kind == "f" and name.rpartition(".")[2] not in STATISTICS


def inner_products(clients: Sequence[np.ndarray], g: np.ndarray) -> list[tuple[float, float]]:
    """Return the inner products w.g and w.w for each array w of ``clients``, floating-point and shaped like ``g``.

    w.w is finite if and only if all numbers of w are (except for overflow in float64).
    """
    clients, g = [w.reshape(-1) for w in clients], g.reshape(-1)
    products = _inner_products(clients, g, np.result_type(np.float32, g, *clients))
    for index, (wg, ww) in enumerate(products):
        if not (_SMALLEST_SQUARE < ww < math.inf and abs(wg) < math.inf):
            # Squares exceed the range of float32, or w is zero.
            products[index] = _inner_products([clients[index]], g, np.dtype(np.float64))[0]
    return products


def cosine_of_products(wg: float, ww: float, gg: float) -> float:
    """Return the cosine from w.g, w.w and g.g: at most 1, and 1 (a plain average) if one side is zero (new biases)."""
    scale = math.sqrt(ww * gg)
    return min(wg / scale, 1.0) if scale else 1.0  # Eq. 2


@dataclass(frozen=True, kw_only=True)
class Cosines:
    """Cosines of one client's layers with their initial values."""

    weights: dict[str, float]  # cosine of each weight or product, in [-1, 1]; 1: same direction
    statistics: dict[str, float]  # cosine of each running statistic
    model: float  # cosine of all weights as one vector
    first_invalid: str | None  # first layer that contains NaN or an infinite value
    # Mean cosine of the weights, weighted by their number of elements. Weights that are initially all zero (new biases)
    # are excluded; None if there are no others.
    mean: float | None = None
    # Distance of the weights, and of the running statistics, from their initial values, each as one vector and relative
    # to the norm of the initial values. Values below 1e-3 are reported as 1e-3.
    relative_change: tuple[float, float] = (0.0, 0.0)

    @property
    def finite(self) -> bool:
        return self.first_invalid is None


NO_COSINES = Cosines(weights={}, statistics={}, model=1.0, first_invalid=None)


class GlobalLayers:
    """The initial layers of clients in a round, to which their updates are compared.

    Attributes
    ----------
    layers : Layers
        Those that the updates have.
    pairs : FactorPairs
        The layers that are compared as products. Others than those in ``layers`` are ignored.
    products : dict of str to LowRankLayer
        Pairs of factors in ``layers``, by the name of B. A is in ``layers`` or fixed.
    first_factors : frozenset of str
        Names of all A in ``layers``.
    factors : frozenset of str
        Names of all A and B in ``layers``.
    """

    def __init__(self, layers: Layers, pairs: FactorPairs = NO_PAIRS) -> None:
        self.layers, self.pairs = layers, pairs
        self.products = {pair.b: pair for pair in pairs.layers if pair.b in layers}
        self.first_factors = frozenset(pair.a for pair in self.products.values()) & layers.keys()
        self.factors = self.first_factors | self.products.keys()
        self._by_size = sorted(layers, key=lambda name: layers[name].size, reverse=True)

    @cached_property
    def _squares(self) -> dict[str, float]:
        return {name: ww for name, (_, ww) in self._measure([self.layers])[0].items()}

    @cached_property
    def _weight_sizes(self) -> dict[str, int]:
        """Return the number of elements of each weight and product."""
        return {
            self.compared_name(name): math.prod(self.product(name, self.layers).shape)
            if name in self.products
            else array.size
            for name, array in self.layers.items()
            if is_weight(name, array) and name not in self.first_factors
        }

    def subset(self, names: Iterable[str]) -> "GlobalLayers":
        """Return some of the layers. Both factors of a pair must be among the names, or neither."""
        return self.with_layers({name: self.layers[name] for name in names})

    def with_layers(self, layers: Layers) -> "GlobalLayers":
        """Return other layers with the same pairs."""
        return GlobalLayers(layers, self.pairs)

    def weights(self) -> "GlobalLayers":
        """Return the weights among the layers."""
        return self.subset(name for name, array in self.layers.items() if is_weight(name, array))

    def product(self, name: str, layers: Layers) -> LowRank:
        """Return the product in ``layers`` whose factor B has this name."""
        return self.pairs.product(self.products[name], layers)

    def deviation_products(self, name: str, models: Sequence[Layers]) -> np.ndarray:
        """Return the inner products of the deviations of one product in all models, float64 ``(K, K)``."""
        return deviation_products(self.product(name, self.layers), [self.product(name, model) for model in models])

    def mean_square(self, name: str, models: Sequence[Layers]) -> float:
        """Return the sum of squares of the mean of one product over all models."""
        return stack([1 / len(models)] * len(models), [self.product(name, model) for model in models]).square()

    def squared_distances(self, layers: Layers) -> dict[str, float]:
        """Return the squared distance of each floating-point layer and product from those in ``layers``."""
        distances = {}
        for name, array in self.layers.items():
            if name in self.products:
                moved = self.product(name, self.layers).minus(self.product(name, layers))
                distances[self.compared_name(name)] = moved.square()
            elif name not in self.factors:
                difference = np.asarray(array - layers[name])
                distances[name] = inner_products([difference], difference)[0][1]
        return distances

    def changes(self, layers: Layers) -> Layers:
        """Return the changes of a client's layers. Factors of a product become those of its change, of twice the rank.

        A product whose factor A is fixed changes by the product of that factor and the change of B.
        """
        changes = {name: layers[name] - array for name, array in self.layers.items()}
        for b, pair in self.products.items():
            if pair.a in self.factors:  # (B_k - B) A_k + B (A_k - A)
                changes[b] = np.hstack((changes[b], self.layers[b]))
                changes[pair.a] = np.vstack((layers[pair.a], changes[pair.a]))
        return changes

    def compared_name(self, name: str) -> str:
        """Return the name under which a layer is compared: that of its product if it is a factor B."""
        return self.products[name].weight if name in self.products else name

    def check(self, layers: Layers) -> None:
        """Raise an `InputError` if a layer is missing or unknown, or has another shape or dtype than the global one."""
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
        """Return the cosines of a client's layers, which passed `check`; reads each array once."""
        return self.cosines_of_all([layers])[0]

    def cosines_of_all(self, clients: Sequence[Layers]) -> list[Cosines]:
        """Return `cosines_of` for several clients, with equal bits; reads the global layers once for all."""
        return [self._cosines(measured) for measured in self._measure(clients)]

    def parallel_for(self, work: Callable[[str], None]) -> None:
        """Call ``work(name)`` for each layer on torch's number of threads.

        NumPy and torch release the interpreter lock while they compute. Threads share one queue of layers, so that a
        busy core delays no other. Small layers are left to one thread: two would mostly wait for the lock. Inside
        ``work`` torch uses one thread, because its own threads synchronize and split arrays depending on their number.
        """
        large = [name for name in self._by_size if self.layers[name].size >= _SMALL_LAYER]
        queue = iter(large)

        def consume() -> None:
            for name in queue:  # `ThreadPoolExecutor.map` would wake a thread for every layer
                work(name)

        numbers = sum(array.size for array in self.layers.values())
        threads = torch.get_num_threads()
        others = min(threads - 1, numbers // _NUMBERS_PER_THREAD)
        torch.set_num_threads(1)  # inherited by new threads
        try:
            with ThreadPoolExecutor(max(others, 1)) as pool:
                running = [pool.submit(consume) for _ in range(others)]
                for name in self._by_size[len(large) :]:
                    work(name)
                consume()
                for thread in running:
                    thread.result()
        finally:
            torch.set_num_threads(threads)

    def _measure(self, clients: Sequence[Layers]) -> list[dict[str, tuple[float, float]]]:
        """Return w.g and w.w of the floating-point layers of each client, in the order of the global layers."""
        floats = {
            name: self.compared_name(name)
            for name, array in self.layers.items()
            if array.dtype.kind == "f" and name not in self.first_factors
        }
        products = {name: [(0.0, 0.0)] * len(clients) for name in floats.values()}

        def measure(name: str) -> None:
            if name in self.products:
                initial = self.product(name, self.layers)
                products[floats[name]] = [_product_products(self.product(name, layers), initial) for layers in clients]
            elif name in floats:
                products[name] = inner_products([layers[name] for layers in clients], self.layers[name])

        self.parallel_for(measure)
        return [{name: pairs[index] for name, pairs in products.items()} for index in range(len(clients))]

    def _cosines(self, measured: dict[str, tuple[float, float]]) -> Cosines:
        weights, statistics = {}, {}
        model_wg = model_ww = model_gg = 0.0
        buffers_delta = buffers_gg = 0.0
        total, numbers = 0.0, 0
        for name, (wg, ww) in measured.items():
            gg = self._squares[name]
            if name in self._weight_sizes:
                weights[name] = cosine_of_products(wg, ww, gg)
                model_wg, model_ww, model_gg = model_wg + wg, model_ww + ww, model_gg + gg
                if gg:
                    size = self._weight_sizes[name]
                    total, numbers = total + size * weights[name], numbers + size
            else:
                statistics[name] = cosine_of_products(wg, ww, gg)
                buffers_delta, buffers_gg = buffers_delta + ww - 2 * wg + gg, buffers_gg + gg
        return Cosines(
            weights=weights,
            statistics=statistics,
            model=cosine_of_products(model_wg, model_ww, model_gg),
            first_invalid=next((name for name, (_, ww) in measured.items() if not ww < _LARGEST_SQUARE), None),
            mean=total / numbers if numbers else None,
            relative_change=(
                relative_norm(model_ww - 2 * model_wg + model_gg, model_gg),
                relative_norm(buffers_delta, buffers_gg),
            ),
        )


def relative_norm(square: float, of: float) -> float:
    """Return the norm of a vector relative to another's, from their squares; at least `_MIN_CHANGE`."""
    if not math.isfinite(square):
        return math.inf
    return max(math.sqrt(max(square, 0.0) / of), _MIN_CHANGE) if of else _MIN_CHANGE if square <= 0 else math.inf


def _product_products(w: LowRank, g: LowRank) -> tuple[float, float]:
    """Return w.g and w.w of products; infinite if a factor is far too large, even if the other one is zero."""
    factors = (float(np.square(factor, dtype=np.float64).sum()) for factor in (w.b, w.a))
    if not all(square < _LARGEST_SQUARE for square in factors):
        return math.inf, math.inf
    return w.inner(g), w.square()


def _inner_products(clients: Sequence[np.ndarray], g: np.ndarray, dtype: np.dtype) -> list[tuple[float, float]]:
    rows = g.size // BLAS_ROW
    end = rows * BLAS_ROW
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = g[end:].astype(dtype, copy=False)
        rests = [(float(x @ y), float(x @ x)) for x in (w[end:].astype(dtype, copy=False) for w in clients)]
        if not rows:
            return rests
        g, clients = g[:end].reshape(rows, BLAS_ROW), [w[:end].reshape(rows, BLAS_ROW) for w in clients]
        sums = np.empty((len(clients), 2, rows), dtype)
        for start in range(0, rows, CACHE_TILE // BLAS_ROW):
            tile = slice(start, start + CACHE_TILE // BLAS_ROW)
            y = g[tile].astype(dtype, copy=False)
            for w, (wg, ww) in zip(clients, sums, strict=True):
                x = w[tile].astype(dtype, copy=False)
                np.vecdot(x, y, out=wg[tile])
                np.vecdot(x, x, out=ww[tile])
        of_rows = sums.sum(axis=2, dtype=np.float64).tolist()
    return [(wg + rest_wg, ww + rest_ww) for (wg, ww), (rest_wg, rest_ww) in zip(of_rows, rests, strict=True)]
