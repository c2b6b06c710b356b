"""Aggregation of LoRA's products around an aggregator, see `strategies.low_rank_aggregation`."""

from fedssl.arrays import Cosines, GlobalLayers, Layers
from fedssl.regularizers.initial_encoder import L2SP
from fedssl.rules import Problem
from fedssl.wire.messages import ClientUpdate
from strategies.gram_matrix import factors_of
from strategies.l_dawa import ScaleUpload
from strategies.low_rank_aggregation import (
    CHANGING_WEIGHTS,
    OF_PRODUCTS,
    combine,
    exact_weight,
    initial_factors,
    low_rank_aggregation,
    nearest_factors,
    stacked_weight,
)
from strategies.mods.base import Mod
from strategies.round_start import StartingModel
from strategies.rules import RunParts
from strategies.run_context import RunContext
from strategies.types import Aggregator, Combination, LinearAggregator
from strategies.update_store import UpdateStorage
from strategies.weighted_sum import WeightedSum

_OTHERS = "set tuning.aggregation=factors or tuning.aggregation=freeze_a"
_OTHER_BASIS = "which have another basis than those that tuning.aggregation=svd makes in every round"


def needs_sums_of_layers(what: str, parts: RunParts) -> Problem:
    """Refuse ``what``, which needs sums of layers, together with an aggregation of products."""
    aggregation = low_rank_aggregation(parts.settings)
    if aggregation not in OF_PRODUCTS:
        return None
    return f"{what} needs sums of layers, which tuning.aggregation={aggregation} replaces by products; {_OTHERS}"


def products_are_aggregated(parts: RunParts) -> Problem:
    """Refuse what needs sums of layers together with an aggregation of products, which needs a weighted sum."""
    settings, aggregation = parts.settings, low_rank_aggregation(parts.settings)
    of_sums = {
        "privacy=central": settings.privacy is not None,
        "server_optimizer": parts.context.has_server_optimizer,
        "aggregation.buffered=true": settings.aggregation.buffered,
        "model_average": settings.algorithm.model_average.instantiate().is_active,
        f"strategy={settings.recording.choices.get('strategy')}": parts.strategy.server.has_server_step,
    }
    problem = next((needs_sums_of_layers(setting, parts) for setting, given in of_sums.items() if given), None)
    is_linear = isinstance(parts.strategy.server.aggregator(settings.rounds), LinearAggregator)
    if problem or aggregation not in OF_PRODUCTS or is_linear:
        return problem
    return (
        f"strategy={settings.recording.choices['strategy']} is no weighted sum of the clients, which "
        f"tuning.aggregation={aggregation} needs; {_OTHERS}"
    )


def changed_weights_fit(parts: RunParts) -> Problem:
    """Refuse factors that clients keep, or are compared with, if the aggregation changes the weights as well."""
    settings, target_init = parts.settings, parts.method.target_init
    aggregation, name = low_rank_aggregation(settings), settings.recording.choices["strategy"]
    if aggregation == "svd":
        return _own_factors_fit(parts)
    if aggregation not in CHANGING_WEIGHTS:
        return None
    if parts.strategy.client.mixes_own_layers:
        return (
            f"clients of strategy={name} keep factors of their own, which do not fit the weights that "
            f"tuning.aggregation={aggregation} changes; {_OTHERS}"
        )
    if parts.regularizer.uses_initial_encoder:
        return (
            f"regularizer={settings.recording.choices['regularizer']} compares with the initial encoder, whose weights "
            f"tuning.aggregation={aggregation} changes; {_OTHERS}"
        )
    if target_init == "average" or (aggregation == "stack" and target_init == "persist"):
        return (
            f"method.target_init={target_init} keeps factors of target networks, which do not fit the weights "
            f"that tuning.aggregation={aggregation} changes; set method.target_init=reset, or {_OTHERS[4:]}"
        )
    aggregator = parts.strategy.server.aggregator(settings.rounds)
    scales = isinstance(aggregator, WeightedSum) and aggregator.scale != "none"
    if aggregation == "stack" and (scales or isinstance(parts.strategy.client.change_upload, ScaleUpload)):
        return (
            f"strategy={name} compares clients with the global product, which tuning.aggregation=stack resets to zero "
            "in every round; set tuning.aggregation=exact or svd"
        )
    return None


def _own_factors_fit(parts: RunParts) -> Problem:
    """Refuse computing with factors of several rounds: the singular vectors of each are another basis."""
    choices, target_init = parts.settings.recording.choices, parts.method.target_init
    if parts.strategy.client.averages_own_layers:
        return f"clients of strategy={choices['strategy']} keep factors of their own, {_OTHER_BASIS}; {_OTHERS}"
    if any(isinstance(term, L2SP) and term.alpha for term in parts.regularizer.terms):
        return f"regularizer={choices['regularizer']} compares with the initial factors, {_OTHER_BASIS}; {_OTHERS}"
    if target_init in ("persist", "average"):
        return (
            f"method.target_init={target_init} keeps factors of target networks, {_OTHER_BASIS}; set "
            f"method.target_init=reset, or {_OTHERS[4:]}"
        )
    return None


class ProductSum:
    """Makes the new factors and weights of one model from the products of its clients in one round.

    ``aggregation`` is one of `OF_PRODUCTS`, and ``seed_path`` the seed and names of the round, for new factors.
    """

    def __init__(self, aggregation: str, storage: UpdateStorage, *, seed_path: tuple[int | str, ...]) -> None:
        self._aggregation, self._storage, self._seed_path = aggregation, storage, seed_path

    def start(self, global_layers: GlobalLayers) -> None:
        self._global = global_layers.subset(name for name in global_layers.layers if name in global_layers.factors)
        self._models = self._storage.new_store(self._global)
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
        nearest = nearest_factors(product, initial)
        return {pair.a: nearest.a, pair.b: nearest.b}


class ProductAggregator:
    """Aggregator whose factors, and weights that clients download, follow from ``products`` of all clients.

    ``weights`` are layers that clients download and do not upload.
    """

    def __init__(self, inner: LinearAggregator, products: ProductSum, *, weights: Layers) -> None:
        self._inner, self._products, self._weights = inner, products, weights

    @property
    def required_metrics(self) -> tuple[str, ...]:
        return self._inner.required_metrics

    def start(self, global_layers: GlobalLayers) -> None:
        self._inner.start(global_layers)
        self._products.start(global_layers)

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        self._inner.add(update, cosines)
        self._products.add(update)

    def finish(self) -> Layers:
        """Return the new layers that clients upload, and the changed ones of the weights."""
        layers = self._inner.finish()
        return {**layers, **self._products.finish(self._inner, layers, self._weights)}


class Products(Mod):
    """Wraps the aggregators of a run."""

    run_rules = (products_are_aggregated, changed_weights_fit)

    def __init__(self, aggregation: str, *, seed: int) -> None:
        self._aggregation, self._seed = aggregation, seed

    @classmethod
    def make(cls, context: RunContext) -> "Products | None":
        aggregation = low_rank_aggregation(context.settings)
        return cls(aggregation, seed=context.settings.seed) if aggregation in OF_PRODUCTS else None

    def aggregator(
        self, inner: Aggregator, start: StartingModel, storage: UpdateStorage, *, round: int, name: str
    ) -> Aggregator:
        assert isinstance(inner, LinearAggregator)  # the strategy was validated
        products = ProductSum(self._aggregation, storage, seed_path=(self._seed, "factors", round, name))
        return ProductAggregator(inner, products, weights=start.frozen)
