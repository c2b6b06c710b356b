"""Aggregation of one model in one round."""

from dataclasses import dataclass, field

from fedssl.arrays import Layers
from server_app.federation import Federation
from strategies.round_start import StartingModel
from strategies.types import Aggregator
from strategies.update_store import CollectingAggregator, UpdateStorage


@dataclass(frozen=True)
class ModelAggregation:
    """Aggregator of one model, the layers that its clients had received, and the parts that they uploaded."""

    inner: Aggregator  # of the strategy
    aggregator: Aggregator  # with the mods around it
    received: dict[int, tuple[str, ...]] = field(default_factory=dict)
    gathered: list[Layers] = field(default_factory=list)

    @classmethod
    def new(
        cls, federation: Federation, start: StartingModel, storage: UpdateStorage, *, round: int, name: str
    ) -> "ModelAggregation":
        """Return the aggregation of the model ``name``, which may store updates in ``storage``."""
        inner = federation.strategy.server.aggregator(round, name)
        if isinstance(inner, CollectingAggregator):
            inner.storage = storage
        aggregator = inner
        for mod in federation.mods:
            aggregator = mod.aggregator(aggregator, start, storage, round=round, name=name)
        return cls(inner, aggregator)
