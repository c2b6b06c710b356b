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
from fedssl.config.settings import Settings
from fedssl.low_rank_products import LowRank, stack
from fedssl.rules import Problem
from fedssl.seeding import numpy_generator
from fedssl.wire.messages import ClientUpdate
from strategies.gram_matrix import factors_of
from strategies.l_dawa import ScaleUpload
from strategies.rules import RunParts
from strategies.types import Combination, LinearAggregator
from strategies.update_store import UpdateStorage
from strategies.weighted_sum import WeightedSum

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


# --- settings and rules ---

_OTHERS = "set tuning.aggregation=factors or tuning.aggregation=freeze_a"


def low_rank_aggregation(settings: Settings) -> str:
    """Return what becomes of LoRA's products; "factors" without LoRA."""
    return str(settings.model.tuning.values.get("aggregation", "factors"))


def client_ranks(settings: Settings) -> tuple[int, ...]:
    """Return the ranks of LoRA's factors that clients exchange, in turn; empty if all have that of the model."""
    return tuple(settings.model.tuning.values.get("ranks") or ())


def ranks_have_products(settings: Settings) -> Problem:
    """Require an aggregation that combines products for clients of different ranks."""
    ranks = client_ranks(settings)
    if not ranks or low_rank_aggregation(settings) in REPLACING_FACTORS:
        return None
    return (
        f"tuning.ranks={list(ranks)} needs an aggregation of products of different ranks; set "
        "tuning.aggregation=svd or stack, or tuning.ranks=null"
    )


def products_replace_sums(parts: RunParts) -> Problem:
    """Refuse what needs sums of layers together with an aggregation of products."""
    settings, aggregation = parts.settings, low_rank_aggregation(parts.settings)
    of_sums = {
        "privacy=central": settings.privacy is not None,
        "secure_aggregation=secagg_plus": settings.secure_aggregation is not None,
        "server_optimizer": parts.context.has_server_optimizer,
        "aggregation.buffered=true": settings.aggregation.buffered,
    }
    used = [setting for setting, given in of_sums.items() if given]
    if aggregation not in OF_PRODUCTS or not used:
        return None
    return f"{used[0]} needs sums of layers, which tuning.aggregation={aggregation} replaces by products; {_OTHERS}"


def products_have_weights(parts: RunParts) -> Problem:
    """Require a strategy that is a weighted sum for an aggregation of products."""
    settings, aggregation = parts.settings, low_rank_aggregation(parts.settings)
    is_linear = isinstance(parts.strategy.server.aggregator(settings.rounds), LinearAggregator)
    if aggregation not in OF_PRODUCTS or is_linear:
        return None
    return (
        f"strategy={settings.recording.choices['strategy']} is no weighted sum of the clients, which "
        f"tuning.aggregation={aggregation} needs; {_OTHERS}"
    )


def changed_weights_fit(parts: RunParts) -> Problem:
    """Refuse factors that clients keep, or are compared with, if the aggregation changes the weights as well."""
    settings, target_init = parts.settings, parts.method.target_init
    aggregation, name = low_rank_aggregation(settings), settings.recording.choices["strategy"]
    if aggregation not in CHANGING_WEIGHTS:
        return None
    if parts.strategy.client.starts_from_own_layers:
        return (
            f"clients of strategy={name} start from factors of their own, which do not fit the weights that "
            f"tuning.aggregation={aggregation} changes; set tuning.aggregation=svd, factors or freeze_a"
        )
    if target_init == "average" or (aggregation == "stack" and target_init == "persist"):
        return (
            f"method.target_init={target_init} keeps factors of target networks, which do not fit the weights "
            f"that tuning.aggregation={aggregation} changes; set method.target_init=reset, or tuning.aggregation=svd"
        )
    aggregator = parts.strategy.server.aggregator(settings.rounds)
    scales = isinstance(aggregator, WeightedSum) and aggregator.scale != "none"
    if aggregation == "stack" and (scales or isinstance(parts.strategy.client.change_upload, ScaleUpload)):
        return (
            f"strategy={name} compares clients with the global product, which tuning.aggregation=stack resets to zero "
            "in every round; set tuning.aggregation=exact or svd"
        )
    return None


SETTINGS_RULES = (ranks_have_products,)
RUN_RULES = (products_replace_sums, products_have_weights, changed_weights_fit)
