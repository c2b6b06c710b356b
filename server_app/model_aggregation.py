"""Aggregation of one model in one round: the strategy's aggregator, and what LoRA's aggregation adds to it."""

from dataclasses import dataclass, field

from fedssl.arrays import Cosines, GlobalLayers, Layers
from fedssl.wire.messages import ClientUpdate
from server_app.federation import Federation
from strategies.low_rank_aggregation import OF_PRODUCTS, ProductSum, low_rank_aggregation
from strategies.types import Aggregator, LinearAggregator
from strategies.update_store import CollectingAggregator, UpdateStorage


@dataclass(frozen=True)
class ModelAggregation:
    """Aggregator of one model, the layers that its clients had received, and the parts that they uploaded."""

    aggregator: Aggregator
    products: ProductSum | None = None  # None if the aggregator's layers are final
    received: dict[int, tuple[str, ...]] = field(default_factory=dict)
    gathered: list[Layers] = field(default_factory=list)

    @classmethod
    def new(cls, federation: Federation, storage: UpdateStorage, *, round: int, name: str) -> "ModelAggregation":
        """Return the aggregation of the model ``name``, which may store updates in ``storage``."""
        aggregator, aggregation = (
            federation.strategy.server.aggregator(round, name),
            low_rank_aggregation(federation.settings),
        )
        if isinstance(aggregator, CollectingAggregator):
            aggregator.storage = storage
        if aggregation not in OF_PRODUCTS:
            return cls(aggregator)
        seed_path = (federation.settings.seed, "factors", round, name)
        return cls(aggregator, ProductSum(aggregation, storage, seed_path=seed_path))

    def start(self, global_layers: GlobalLayers) -> None:
        """Start the round."""
        self.aggregator.start(global_layers)
        if self.products is not None:
            self.products.start(global_layers)

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Add a validated update."""
        self.aggregator.add(update, cosines)
        if self.products is not None:
            self.products.add(update)

    def finish(self, weights: Layers) -> tuple[Layers, Layers]:
        """Return the new layers that clients upload, and the changed ones of the ``weights`` that they download."""
        layers = self.aggregator.finish()
        if self.products is None:
            return layers, {}
        assert isinstance(self.aggregator, LinearAggregator)  # the strategy was validated
        changed = self.products.finish(self.aggregator, layers, weights)
        uploaded = {name: changed.pop(name, array) for name, array in layers.items()}
        return uploaded, changed
