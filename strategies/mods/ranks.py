"""Ranks of LoRA's factors: a client exchanges the leading factors of a rank that may be below that of the model.

The server cuts the factors that it sends, and pads those that it receives with zeros. A client does the reverse.
"""

from dataclasses import replace

from fedssl.arrays import GlobalLayers, Layers
from fedssl.config.settings import Settings
from fedssl.low_rank_products import cut_factors, pad_factors, sort_factors
from fedssl.methods.base import SSLMethod
from fedssl.rules import Problem
from fedssl.wire.messages import ClientUpdate, TrainPlan
from strategies.low_rank_aggregation import REPLACING_FACTORS, low_rank_aggregation
from strategies.mods.base import ClientMod, LayerCache, Mod
from strategies.round_start import RoundStart
from strategies.run_context import RunContext
from strategies.types import GlobalModel


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


class Ranks(Mod):
    """Cuts and pads factors. Its variant is a client's rank; None if it is that of the model."""

    settings_rules = (ranks_have_products,)

    def __init__(self, context: RunContext) -> None:
        settings, method = context.settings, context.method
        self._pairs, self._ranks = method.low_rank_layers, client_ranks(settings)
        self._model_rank = len(method.named_tensors[self._pairs[0].a])
        # A client's limit has no effect on an aggregation that combines factors: it refuses a plan of a larger rank.
        self._heeds_limits = low_rank_aggregation(settings) in REPLACING_FACTORS
        # Training on the server, which comes first, leaves no order of the factors that can be cut.
        self._sorted_at = settings.calibration.when if settings.calibration and self._heeds_limits else None

    @classmethod
    def make(cls, context: RunContext) -> "Ranks | None":
        return cls(context) if context.method.low_rank_layers else None

    def begin(self, model: GlobalModel, round: int) -> GlobalModel:
        return self._sorted(model) if self._sorted_at == "start" else model

    def end(self, model: GlobalModel, round: int) -> GlobalModel:
        return self._sorted(model) if self._sorted_at == "end" else model

    def _sorted(self, model: GlobalModel) -> GlobalModel:
        return replace(model, layers=sort_factors(model.layers, self._pairs))

    def variant(self, client: int, at: RoundStart) -> int | None:
        rank = self._ranks[client % len(self._ranks)] if self._ranks else None
        info = at.info_of(client)
        if info is None or info.max_rank is None or not self._heeds_limits:
            return rank
        return min(info.max_rank, rank or self._model_rank)

    def exchanged(self, layers: Layers, rank: int | None) -> Layers:
        return layers if rank is None else cut_factors(layers, self._pairs, rank)

    def receive(self, update: ClientUpdate, rank: int | None, expected: GlobalLayers) -> ClientUpdate:
        if rank is None:
            return update
        shapes = {name: array.shape for name, array in expected.layers.items()}
        return replace(update, layers=pad_factors(update.layers, self._pairs, shapes))


class RanksClient(ClientMod):
    """Pads the factors that a client downloads, and cuts those that it uploads to the same rank."""

    def __init__(self, method: SSLMethod) -> None:
        self._method = method

    def download(self, plan: TrainPlan, cache: LayerCache) -> TrainPlan:
        pairs = self._method.low_rank_layers
        if not pairs:
            return plan
        shapes = {name: tensor.shape for name, tensor in self._method.named_tensors.items()}
        models = [pad_factors(layers, pairs, shapes) for layers in (plan.layers, *plan.candidate_arrays)]
        return replace(plan, layers=models[0], candidate_arrays=tuple(models[1:]))

    def upload(self, layers: Layers, plan: TrainPlan) -> Layers:
        rank = received_rank(self._method, plan)
        return layers if rank is None else cut_factors(layers, self._method.low_rank_layers, rank)


def received_rank(method: SSLMethod, plan: TrainPlan) -> int | None:
    """Return the rank of the factors in a plan; None without factors."""
    factors = (plan.layers[pair.b] for pair in method.low_rank_layers if pair.b in plan.layers)
    return next((factor.shape[1] for factor in factors), None)
