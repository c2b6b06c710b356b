"""Aggregation of LoRA's products: the mean of factors is not the factor of the mean.

A linear strategy gives the new product P' = c_0 P + sum_k c_k P_k, with P = s B A from which the clients started and
P_k = s B_k A_k (`strategies.types.LinearAggregator`). Its own layers B' and A' are the same combinations of the
factors, and s B' A' differs from P' by terms such as B_1 A_2. ``tuning.aggregation`` selects what becomes of P':

- ``factors`` (FedIT, Zhang et al., arXiv 2305.05644): B' and A', the product is approximate;
- ``freeze_a`` (FFA-LoRA, Sun et al., arXiv 2403.12313): nobody trains A, so that s B' A = P';
- ``exact`` (FedEx-LoRA, Singhal et al., arXiv 2410.09432): B' and A', and the weight becomes W + P' - s B' A';
- ``stack`` (FLoRA, Wang et al., arXiv 2409.05976): the weight becomes W + P', and clients start from B = 0;
- ``svd`` (FlexLoRA, Bai et al., arXiv 2402.11505): the factors of the nearest product of rank r.

P' is never formed: its factors are those of all clients side by side (`fedssl.low_rank_products.stack`). W + P' is a
layer that clients download and do not upload (`fedssl.methods.base.SSLMethod.server_merged_names`).
"""

import math
from collections.abc import Mapping

import numpy as np

from fedssl.arrays import GlobalLayers, Layers
from fedssl.low_rank_products import LowRank, stack
from fedssl.seeding import numpy_generator
from fedssl.wire.messages import ClientUpdate
from strategies.gram_matrix import factors_of
from strategies.types import Combination, LinearAggregator
from strategies.update_store import UpdateStorage

# Aggregations that need the strategy's product, and those of them that add it to the weight.
OF_PRODUCTS = ("exact", "stack", "svd")
CHANGING_WEIGHTS = ("exact", "stack")
# Those whose new factors depend on the products alone. The others combine the factors, which must have one rank.
REPLACING_FACTORS = ("stack", "svd")


def combine(combination: Combination, initial: LowRank, products: Mapping[int, LowRank]) -> LowRank:
    """Return P' from the initial product and those of the clients, by client id. Its rank is the sum of theirs."""
    terms = [(combination.initial, initial)]
    terms += [(combination.clients.get(client, 0.0), product) for client, product in products.items()]
    used = [(coefficient, product) for coefficient, product in terms if coefficient] or [(0.0, initial)]
    return stack(*zip(*used, strict=True))


def exact_weight(weight: np.ndarray, product: LowRank, factors: LowRank) -> np.ndarray:
    """Return W + P' - s B' A' (FedEx-LoRA): with the new factors it is the aggregated weight."""
    return stacked_weight(weight, product.minus(factors))


def stacked_weight(weight: np.ndarray, product: LowRank) -> np.ndarray:
    """Return W + P' (FLoRA), in the shape and dtype of the weight. It is computed in float64."""
    return np.asarray((weight + product.dense().reshape(weight.shape)).astype(weight.dtype))


def initial_factors(product: LowRank, *, seed_path: tuple[int | str, ...]) -> LowRank:
    """Return new factors of a product of zero, in the shapes and dtypes of ``product``: A uniform, and B zero.

    A is up to 1 / sqrt(n), as in PEFT and as the weight of a linear layer.
    """
    bound = 1 / math.sqrt(product.a.shape[1])
    generator = numpy_generator(int(seed_path[0]), *seed_path[1:])
    a = generator.uniform(-bound, bound, product.a.shape).astype(product.a.dtype)
    return LowRank(np.zeros_like(product.b), a, product.scale)


class ProductSum:
    """Makes the new factors and weights of one model from the products of its clients in one round.

    ``aggregation`` is one of `OF_PRODUCTS`, and ``seed_path`` the seed and names of the round, for new factors.
    """

    def __init__(self, aggregation: str, storage: UpdateStorage, *, seed_path: tuple[int | str, ...]) -> None:
        self._aggregation, self._storage, self._seed_path = aggregation, storage, seed_path

    def start(self, global_layers: GlobalLayers) -> None:
        """Start a round."""
        factors = {*global_layers.products, *global_layers.first_factors}
        self._global = global_layers.subset(name for name in global_layers.layers if name in factors)
        self._models = self._storage.new_store(self._global.layers, global_layers.pairs)
        self._clients: list[int] = []

    def add(self, update: ClientUpdate) -> None:
        """Add an update that `GlobalLayers.check` validated."""
        self._models.add(update.layers)
        self._clients.append(update.partition_id)

    def finish(self, aggregator: LinearAggregator, layers: Layers, weights: Layers) -> Layers:
        """Return the factors to use instead of those in ``layers``, and the changed ones of ``weights``.

        ``layers`` are those that ``aggregator`` has returned.
        """
        changed: Layers = {}

        def change(name: str) -> None:
            if name in self._global.products:
                changed.update(self._changed(name, aggregator.combination(name), layers, weights))

        self._global.parallel_for(change)
        self._models.close()
        return changed

    def _changed(self, name: str, combination: Combination, layers: Layers, weights: Layers) -> Layers:
        reference, pair = self._global, self._global.products[name]
        initial = reference.product(name, reference.layers)
        models = factors_of(reference, name, self._models)
        products = {
            client: reference.product(name, factors) for client, factors in zip(self._clients, models, strict=True)
        }
        product = combine(combination, initial, products)
        if self._aggregation == "exact":
            return {pair.weight: exact_weight(weights[pair.weight], product, reference.product(name, layers))}
        if self._aggregation == "stack":
            new = initial_factors(initial, seed_path=(*self._seed_path, name))
            return {pair.weight: stacked_weight(weights[pair.weight], product), pair.a: new.a, pair.b: new.b}
        nearest = LowRank(product.b / initial.scale, product.a, initial.scale).truncate(initial.rank)
        return {pair.a: nearest.a.astype(initial.a.dtype), pair.b: nearest.b.astype(initial.b.dtype)}
