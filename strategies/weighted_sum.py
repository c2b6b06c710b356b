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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedssl.arrays import CACHE_TILE, Cosines, GlobalLayers, Layers, is_weight
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.wire.messages import NUM_EXAMPLES, TRAIN_LOSS, ClientUpdate
from strategies.types import Combination

# Layers in shared memory are read-only, and are only read here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

SCALES = ("none", "layer", "model")
REQUIRED_METRICS = {"uniform": (), "examples": (NUM_EXAMPLES,), "loss": (TRAIN_LOSS,)}

MIN_BLOCK, MAX_BLOCKS = 5, 16

NO_COSINES = Cosines(weights={}, statistics={}, model=1.0, first_invalid=None)


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
class _Addend:
    """Layers to add to a sum: multiply the sum by ``factor``, then add each layer times its coefficient."""

    factor: float  # 0 overwrites the sum
    coefficients: dict[str, float]
    layers: Layers


@dataclass(frozen=True)
class _Block:
    """Clients to add, to their own sum and then that to the whole one by ``merge``, or to the whole one directly."""

    addends: Sequence[_Addend]
    merge: _Addend | None = None


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
    then `finish`. `start` starts a new round. `add_all` adds all clients of a round, faster and bit-identical.

    Parameters
    ----------
    weighting : {"uniform", "examples", "loss"}
        beta: 1, the number of examples, or exp(-loss).
    scale : {"none", "layer", "model"}
        s: 1, the cosine of each layer, or one cosine over all weights.
    buffers : {"average", "scale"}
        Average running statistics, or scale them like weights.
    normalize : bool
        Divide the sum by that of beta |s| instead of that of beta.
    """

    def __init__(
        self, *, weighting: str = "uniform", scale: str = "none", buffers: str = "average", normalize: bool = False
    ) -> None:
        check_arguments("strategy", owner="LDAWA", weighting=weighting, buffers=buffers)
        if scale not in SCALES:
            raise InputError(f"scale={scale} must be {' or '.join(SCALES)}")
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
        """Set the ids of the clients of the round, ascending, which decide the blocks."""
        self._clients = clients  # shared: a round may have as many sums as clients

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
        block = self._open_block(update.partition_id)
        self._accumulate(block, [_Block([self._weighted(block, update, cosines)])])

    def add_weighted(self, update: ClientUpdate, weight: float) -> None:
        """Add an update with an explicit weight and without scaling. The options do not apply."""
        block = self._open_block(update.partition_id)
        coefficients = dict.fromkeys(block.layers, weight)
        self._record_terms(update, math.inf, weight, coefficients)
        self._accumulate(block, [_Block([_addend(block, update.layers, coefficients, weight=weight)])])

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
            self._accumulate(self._sum, [_Block([_merge(self._sum, block)])])

    def add_all(self, updates: Sequence[ClientUpdate]) -> None:
        """Validate, compare and add the updates of a round, each read in tiles that stay in the cache."""
        check_updates(self._global, updates)
        if self.scale == "none":
            all_cosines = [NO_COSINES] * len(updates)
        else:
            all_cosines = self._global.cosines_of_all([update.layers for update in updates])
        for update, cosines in zip(updates, all_cosines, strict=True):
            if not cosines.finite:
                raise InputError(
                    f"client {update.partition_id}: layer {cosines.first_invalid} has NaN or infinite values"
                )
        if not updates:
            return
        self._sum, size, blocks = self._new_sum(), num_per_block(len(updates)), []
        for start in range(0, len(updates), size):
            # The first block is summed in place.
            block = PartialSum(layers={}, scaled_weights=dict.fromkeys(self._sum.layers, 0.0)) if start else self._sum
            pairs = zip(updates[start : start + size], all_cosines[start : start + size], strict=True)
            addends = [self._weighted(block, update, cosines) for update, cosines in pairs]
            blocks.append(_Block(addends, _merge(self._sum, block) if start else None))
        self._accumulate(self._sum, blocks)

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

    def _record_terms(self, update: ClientUpdate, loss: float, weight: float, coefficients: dict[str, float]) -> None:
        if self._global.products:
            self._terms.append(_Term(update.partition_id, loss, weight, coefficients))

    def _accumulate(self, total: PartialSum, blocks: Sequence[_Block]) -> None:
        self._global.parallel_for(lambda name: _accumulate(total.layers[name], name, blocks))

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

    def _weighted(self, total: PartialSum, update: ClientUpdate, cosines: Cosines) -> _Addend:
        """Add the weights of an update to a sum, and return what is to be added to its layers."""
        weight, loss = 1.0, math.inf
        if self.weighting == "examples":
            weight = _metric(update, NUM_EXAMPLES, update.num_examples)
            if weight <= 0:
                raise InputError(f"client {update.partition_id}: {NUM_EXAMPLES}={weight:g} is not positive")
        elif self.weighting == "loss":
            loss = _metric(update, TRAIN_LOSS, update.train_loss)  # Eq. 6
        coefficients = {name: weight * self._scale_of(name, cosines) for name in self._global.layers}
        self._record_terms(update, loss, weight, coefficients)
        return _addend(total, update.layers, coefficients, weight=weight, loss=loss)

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


def _addend(
    total: PartialSum, layers: Layers, coefficients: dict[str, float], *, weight: float, loss: float = math.inf
) -> _Addend:
    """Add one client's weights to a sum, and return what is to be added to its layers."""
    scaled_weights = {name: abs(value) for name, value in coefficients.items()}
    client = PartialSum(layers={}, scaled_weights=scaled_weights, weight=weight, min_loss=loss)
    own, other = total.add_weights(client)
    return _Addend(own, {name: other * value for name, value in coefficients.items()}, layers)


def _loss_weight(loss: float, min_loss: float) -> float:
    """Return the weight of a loss relative to that of the smallest one."""
    return 1.0 if loss == min_loss else math.exp(min_loss - loss)


def _merge(total: PartialSum, block: PartialSum) -> _Addend:
    """Add the weights of a block to a sum, and return what is to be added to its layers."""
    own, other = total.add_weights(block)
    return _Addend(own, dict.fromkeys(total.layers, other), block.layers)


def _accumulate(total: np.ndarray, name: str, blocks: Sequence[_Block]) -> None:
    """Add blocks to a layer of a sum, in tiles that stay in the cache."""
    sums = torch.from_numpy(total.reshape(-1))
    clients = [[torch.from_numpy(addend.layers[name].reshape(-1)) for addend in block.addends] for block in blocks]
    scratch = torch.empty(min(CACHE_TILE, len(sums)) if blocks[-1].merge else 0, dtype=sums.dtype)
    for start in range(0, len(sums), CACHE_TILE):
        tile = slice(start, start + CACHE_TILE)
        for block, layers in zip(blocks, clients, strict=True):
            own_sum = scratch[: len(sums[tile])] if block.merge else sums[tile]
            for addend, layer in zip(block.addends, layers, strict=True):
                _add(own_sum, layer[tile], addend.factor, addend.coefficients[name])
            if block.merge:
                _add(sums[tile], own_sum, block.merge.factor, block.merge.coefficients[name])


def _add(sums: torch.Tensor, layer: torch.Tensor, factor: float, coefficient: float) -> None:
    if factor == 0:
        torch.mul(layer.to(sums.dtype), coefficient, out=sums)
        return
    if factor != 1:
        sums.mul_(factor)
    # One operation that multiplies and adds; NumPy needs two and a buffer.
    sums.add_(layer, alpha=coefficient)


def as_reference(layers: Layers | GlobalLayers) -> GlobalLayers:
    """Return global layers as a reference, without products unless they are one."""
    return layers if isinstance(layers, GlobalLayers) else GlobalLayers(layers)


def check_updates(global_layers: GlobalLayers, updates: Sequence[ClientUpdate]) -> None:
    """Call `GlobalLayers.check` for every update. The `InputError` names the client."""
    for update in updates:
        try:
            global_layers.check(update.layers)
        except InputError as problem:
            raise InputError(f"client {update.partition_id}: {problem}") from problem


def weighted_sum(
    global_layers: Layers | GlobalLayers, updates: Sequence[ClientUpdate], *, aggregator: WeightedSum
) -> Layers:
    """Aggregate a list of updates in order of partition id."""
    aggregator.start(as_reference(global_layers))
    aggregator.add_all(sorted(updates, key=lambda update: update.partition_id))
    return aggregator.finish()


def _sum_dtype(array: np.ndarray) -> np.dtype:
    # float16 is summed in float32. Counters need all digits of an integer.
    return np.result_type(array.dtype, np.float32) if array.dtype.kind == "f" else np.dtype(np.float64)


def _metric(update: ClientUpdate, name: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise InputError(f"client {update.partition_id}: {name} is {value}, but the weighting needs a number")
    return float(value)
