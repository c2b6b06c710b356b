"""Streaming weighted sum of FedAvg, loss-weighted averaging, L-DAWA and M-DAWA.

All of them compute ``sum_k beta_k s_k w_k / sum_k beta_k`` for every layer. The weights beta are 1, the numbers of
examples (Eq. 1 of L-DAWA, Rehman et al., ICCV 2023) or exp(-loss) (its Eq. 6). The scale s is 1 (FedAvg), the cosine of
the client's layer (Eqs. 4-6) or that of its whole model (Eqs. 2-3) with the global one. With ``normalize`` the divisor
is ``sum_k beta_k |s_k|``, so that scales weight the clients against each other and no layer shrinks.

Updates are added one by one, in blocks of consecutive clients (`num_per_block`). The sum of each block is added to that
of the blocks before it. Blocks depend only on the sampled clients, so any process can compute the sum of a block, with
equal bits. A round needs the memory of two models beside the global one for any number of clients.

The scale of a product of two factors (LoRA) multiplies its factor B. Factors A are averaged with s = 1, so that the
product of a single client is scaled once.

Running statistics are averaged with s = 1 (``buffers="average"``), or scaled like weights as in the authors' code
(``buffers="scale"``). Counters are averaged with s = 1 and rounded to the nearest integer.
"""

import math
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from fedssl.arrays import CACHE_TILE, Cosines, GlobalLayers, Layers, is_weight
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.wire.messages import NUM_EXAMPLES, TRAIN_LOSS, ClientUpdate
from strategies.types import Combination

# Layers in shared memory are read-only, and are only read here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

REQUIRED_METRICS = {"uniform": (), "examples": (NUM_EXAMPLES,), "loss": (TRAIN_LOSS,)}

MIN_BLOCK, MAX_BLOCKS = 5, 16


def num_per_block(num_clients: int) -> int:
    """Return the number of clients in each block of a round; the last block may have fewer."""
    return max(MIN_BLOCK, math.ceil(num_clients / MAX_BLOCKS))


@dataclass(kw_only=True)
class PartialSum:
    """Sum of the updates of some clients.

    ``layers`` has ``sum_k beta_k s_k w_k``, ``weight`` is ``sum_k beta_k``, and ``scaled_weights`` has ``sum_k
    beta_k |s_k|`` by layer. Weights that depend on losses are relative to that of ``min_loss``.
    """

    layers: Layers
    scaled_weights: dict[str, float]
    weight: float = 0.0
    min_loss: float = math.inf
    is_empty: bool = True  # the arrays are not initialized
    block: int = 0  # number of the block of these clients

    def add_weights(self, addend: "PartialSum") -> tuple[float, float]:
        """Add the weights of another sum. Return the factors by which the layers of both must be multiplied."""
        # Weights are relative to the smallest loss so far: exp(-1000) would be 0 for every client.
        min_loss = min(self.min_loss, addend.min_loss)
        own, other = (_loss_weight(loss, min_loss) for loss in (self.min_loss, addend.min_loss))
        self.weight = own * self.weight + other * addend.weight
        for name, weight in addend.scaled_weights.items():
            self.scaled_weights[name] = own * self.scaled_weights[name] + other * weight
        own = 0.0 if self.is_empty else own
        self.min_loss, self.is_empty = min_loss, False
        return own, other

    def writable(self) -> "PartialSum":
        """Return the sum with arrays that can be changed: copies of those in shared memory."""
        return replace(self, layers={name: a if a.flags.writeable else a.copy() for name, a in self.layers.items()})


@dataclass(frozen=True)
class _Term:
    """Weight of one client, relative to exp(-loss), and its products with the scales of the layers."""

    client: int
    loss: float
    weight: float
    coefficients: dict[str, float]


class WeightedSum:
    """Weighted average of client models, optionally scaled by their cosines with the global model.

    Call `set_clients`, without which all clients are one block, `start`, `add` for each client in order of its id,
    then `finish`. `start` starts a new round. `add_all` is faster than `add`, with equal bits. Options as in
    `strategies.l_dawa.l_dawa`; ``scale`` is s: "none" is 1, "layer" the cosine of each layer, "model" one cosine over
    all weights.
    """

    def __init__(
        self, *, weighting: str = "uniform", scale: str = "none", buffers: str = "average", normalize: bool = False
    ) -> None:
        check_arguments("strategy", owner="LDAWA", weighting=weighting, buffers=buffers)
        self.weighting, self.scale, self.buffers = weighting, scale, buffers
        self.normalize = normalize
        self._clients: list[int] = []
        self._number = 0  # of the current block

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that every client must report."""
        return REQUIRED_METRICS[self.weighting]

    @property
    def can_merge(self) -> bool:
        """Return whether sums of clients can be merged. A subclass may need more than a sum."""
        return type(self) is WeightedSum

    def set_clients(self, clients: list[int]) -> None:
        """Set the ids of the clients of the round, ascending, which decide the blocks, if sums can be merged."""
        self._clients = clients if self.can_merge else []  # shared: a round may have as many sums as clients

    def block_of(self, client: int) -> int:
        """Return the number of the block of a client. Those that are not of the round follow the last block."""
        position = bisect_left(self._clients, client)
        if self._clients[position : position + 1] != [client]:
            return self._number
        return position // num_per_block(len(self._clients))

    def start(self, global_layers: GlobalLayers) -> None:
        """Start a round."""
        self._global = global_layers
        self._sum: PartialSum | None = None  # of the blocks that have ended
        self._block: PartialSum | None = None
        self._number = 0
        self._terms: list[_Term] = []  # for `combination`; empty without products

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Add an update that `GlobalLayers.check` validated."""
        self.add_all([update], [cosines])

    def add_all(self, updates: Sequence[ClientUpdate], all_cosines: Sequence[Cosines]) -> None:
        """Add updates of clients of the round in order of their ids, tile by tile for all clients of a block."""
        terms = map(self._term, updates, all_cosines)
        for _, block in groupby(zip(updates, terms, strict=True), lambda pair: self.block_of(pair[0].partition_id)):
            self._add_clients(list(block))

    def _term(self, update: ClientUpdate, cosines: Cosines) -> _Term:
        weight, loss = 1.0, math.inf
        if self.weighting == "examples":
            weight = _metric(update, NUM_EXAMPLES, update.num_examples)
            if weight <= 0:
                raise InputError(f"client {update.partition_id}: {NUM_EXAMPLES}={weight:g} is not positive")
        elif self.weighting == "loss":
            loss = _metric(update, TRAIN_LOSS, update.train_loss)  # Eq. 6
        coefficients = {name: weight * self._scale_of(name, cosines) for name in self._global.layers}
        return _Term(update.partition_id, loss, weight, coefficients)

    def add_weighted(self, update: ClientUpdate, weight: float) -> None:
        """Add an update with an explicit weight and without scaling. The options do not apply."""
        coefficients = dict.fromkeys(self._global.layers, weight)
        self._add_clients([(update, _Term(update.partition_id, math.inf, weight, coefficients))])

    def merge(self, block: PartialSum) -> None:
        """Add the sum of the first clients of a block, a result of `take_block`."""
        assert self._block is None or block.block != self._number, "the first clients of a block must be added first"
        self._end_block()
        self._number, self._block = block.block, block

    def take_block(self) -> PartialSum:
        """Return and remove the sum of the current block, which must have clients."""
        assert self._block is not None, "the block has no clients"
        block, self._block = self._block, None
        return block

    def _end_block(self) -> None:
        """Add the sum of the current block, if it has clients, to that of the blocks before it."""
        if self._sum is None:
            self._sum, self._block = self._block, None
        elif self._block is not None:
            block, self._sum = self.take_block(), self._sum.writable()
            own, other = self._sum.add_weights(block)
            self._add(self._sum, [(block.layers, own, dict.fromkeys(block.layers, other))])

    def finish(self) -> Layers:
        """Return the new global layers. Raises `InputError` without any update."""
        self._end_block()
        if self._sum is None:
            raise InputError("no client sent an update; at least one is needed")
        total, self._sum = self._sum.writable(), None
        result = dict(total.layers)

        def divide(name: str) -> None:
            array, dtype = result[name], self._global.layers[name].dtype
            divisor = total.scaled_weights[name] or total.weight if self.normalize else total.weight
            np.divide(array, array.dtype.type(divisor), out=array)
            if dtype.kind != "f":
                np.rint(array, out=array)
            result[name] = array.astype(dtype, copy=False)

        self._global.parallel_for(divide)
        return result

    def combination(self, name: str) -> Combination:
        """Return the weights beta_k s_k / sum_k beta_k of all added updates for a factor B or another layer."""
        min_loss = min((term.loss for term in self._terms), default=math.inf)
        scaled = {term.client: _loss_weight(term.loss, min_loss) * term.coefficients[name] for term in self._terms}
        divisor = sum(_loss_weight(term.loss, min_loss) * term.weight for term in self._terms)
        if self.normalize:
            divisor = sum(map(abs, scaled.values())) or divisor
        return Combination(0.0, {client: coefficient / divisor for client, coefficient in scaled.items()})

    def _add_clients(self, clients: Sequence[tuple[ClientUpdate, _Term]]) -> None:
        """Add the layers of clients of one block, each times its coefficient, to the sum of the block."""
        total, addends = self._open_block(clients[0][0].partition_id), []
        for update, term in clients:
            if self._global.products:
                self._terms.append(term)
            scaled_weights = {name: abs(value) for name, value in term.coefficients.items()}
            client = PartialSum(layers={}, scaled_weights=scaled_weights, weight=term.weight, min_loss=term.loss)
            own, other = total.add_weights(client)
            addends.append((update.layers, own, {name: other * value for name, value in term.coefficients.items()}))
        self._add(total, addends)

    def _add(self, total: PartialSum, addends: Sequence[tuple[Layers, float, Mapping[str, float]]]) -> None:
        """Multiply the layers of a sum by a factor, and add others times their coefficients; repeat."""

        def add(name: str) -> None:
            of_layer = [(layers[name], factor, coefficients[name]) for layers, factor, coefficients in addends]
            _add_scaled(total.layers[name], of_layer)

        self._global.parallel_for(add)

    def _new_sum(self) -> PartialSum:
        layers = {name: np.empty(array.shape, _sum_dtype(array)) for name, array in self._global.layers.items()}
        return PartialSum(layers=layers, scaled_weights=dict.fromkeys(layers, 0.0))

    def _open_block(self, client: int) -> PartialSum:
        """Return the sum of the block of a client."""
        number = self.block_of(client)
        if number != self._number:
            self._end_block()
            self._number = number
        self._block = self._new_sum() if self._block is None else self._block.writable()
        self._block.block = number
        return self._block

    def _scale_of(self, name: str, cosines: Cosines) -> float:
        """Return s_k of a layer."""
        array = self._global.layers[name]
        if self.scale == "none" or array.dtype.kind != "f" or name in self._global.first_factors:
            return 1.0
        if not is_weight(name, array):
            if self.buffers == "average":
                return 1.0
            return cosines.model if self.scale == "model" else cosines.statistics[name]
        if self.scale == "model":
            return cosines.model  # Eq. 3
        return cosines.weights[self._global.compared_name(name)]  # Eqs. 4-6


def _loss_weight(loss: float, min_loss: float) -> float:
    """Return the weight of a loss relative to that of the smallest one."""
    return 1.0 if loss == min_loss else math.exp(min_loss - loss)


def _add_scaled(total: np.ndarray, addends: Iterable[tuple[np.ndarray, float, float]]) -> None:
    """Multiply a layer of a sum by a factor, of which 0 overwrites it, and add another one times its coefficient."""
    layers, factors, coefficients = zip(*addends, strict=True)
    tensors = [torch.from_numpy(array.reshape(-1)) for array in (total, *layers)]
    tiles = zip(*(each.split(CACHE_TILE) for each in tensors), strict=True) if total.size > CACHE_TILE else [tensors]
    for sums, *tile in tiles:  # those of the sum stay in the cache
        for addend, factor, coefficient in zip(tile, factors, coefficients, strict=True):
            if factor == 0:
                torch.mul(addend.to(sums.dtype), coefficient, out=sums)
                continue
            if factor != 1:
                sums.mul_(factor)
            sums.add_(addend, alpha=coefficient)  # multiplies and adds at once; NumPy needs two steps and a buffer


def _sum_dtype(array: np.ndarray) -> np.dtype:
    # float16 is summed in float32. Counters need all digits of an integer.
    return np.result_type(array.dtype, np.float32) if array.dtype.kind == "f" else np.dtype(np.float64)


def _metric(update: ClientUpdate, name: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise InputError(f"client {update.partition_id}: {name} is {value}, but the weighting needs a number")
    return float(value)
