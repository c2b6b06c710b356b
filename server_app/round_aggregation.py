"""The aggregation of a round: its updates, one by one or as sums, become new models and rows of metrics."""

import logging
from collections.abc import Callable, Mapping, Sequence

from fedssl.arrays import Layers
from server_app.exchanges.base import Sum, TooFewUpdatesError
from server_app.exchanges.sums import LostSumError
from server_app.federation import Federation
from server_app.new_state import ModelAggregation, new_model, new_state
from server_app.updates import RoundResult, ValidUpdate
from strategies.round_start import ClientAssignment, StartingModel
from strategies.types import GLOBAL, Mergeable, ServerState
from strategies.update_store import UpdateStorage

log = logging.getLogger("fedssl")

UpdateObserver = Callable[[int, Layers], None]  # gets the client and the active layers of every update that is used


class RoundAggregation:
    """Aggregations of the ``models`` of a round by name, with its result so far."""

    def __init__(
        self,
        federation: Federation,
        state: ServerState,
        *,
        names: Sequence[str],
        clients: list[int],
        starts: Mapping[str, StartingModel],
        storage: UpdateStorage,
        observers: Sequence[UpdateObserver],
    ) -> None:
        self._federation, self._state, self._starts, self._observers = federation, state, starts, observers
        self.result = RoundResult(state.round + 1)
        self._state_rounds = {**state.state_rounds}
        self.models = {
            name: ModelAggregation.new(federation, starts[name], storage, round=self.result.round, name=name)
            for name in names
        }
        for aggregation in self.models.values():
            if isinstance(aggregation.inner, Mergeable):
                aggregation.inner.set_clients(clients)

    def mergeable(self) -> Mergeable | None:
        """Return the only aggregator if sums of updates are enough for it and for all others that see updates."""
        federation, aggregation = self._federation, self.models.get(GLOBAL)
        if aggregation is None or self._observers:
            return None
        if federation.strategy.server.num_comparison_images or any(mod.sees_updates for mod in federation.mods):
            return None
        aggregator = aggregation.aggregator
        return aggregator if isinstance(aggregator, Mergeable) and aggregator.can_merge else None

    def start(self) -> None:
        for name, aggregation in self.models.items():
            aggregation.aggregator.start(self._starts[name].expected_upload)

    def add(self, valid: ValidUpdate) -> None:
        slot, update, federation = valid.slot, valid.update, self._federation
        start = self._starts[slot.start]
        layers = {**start.frozen, **update.layers}
        if federation.strategy.server.num_comparison_images:
            slot.features = federation.extract_features(layers)
        for mod in federation.mods:
            update = mod.contribute(update, start)
        for name in slot.destinations:
            self.models[name].aggregator.add(update, valid.cosines)
        for observe in self._observers:
            observe(slot.client, layers)
        self._record(valid)

    def merge(self, received: Sum, slots: Mapping[int, ClientAssignment]) -> None:
        """Add a sum of updates, or drop its clients if it is lost."""
        aggregator = self.models[GLOBAL].aggregator
        assert isinstance(aggregator, Mergeable)
        try:
            aggregator.merge(received.total.get())
        except LostSumError as reason:
            for client in received.updates:
                self.result.drop(client, str(reason))
            return
        for client, summed in received.updates.items():
            slots[client].destinations = (GLOBAL,)
            self._record(ValidUpdate(slots[client], summed.update, summed.cosines, summed.num_bytes))

    def _record(self, valid: ValidUpdate) -> None:
        slot, update = valid.slot, valid.update
        for name in slot.destinations:
            self.models[name].received[slot.client] = slot.downloaded
            self.models[name].gathered.append(update.uploaded_parts)
        self.result.clients.append(valid.metrics(self.result.round))
        if any(update.state_rounds):
            self._state_rounds[slot.client] = update.state_rounds[1]

    def finish(self, slots: Mapping[int, ClientAssignment]) -> ServerState:
        """Return the state after the round, and complete the result; raises `TooFewUpdatesError`."""
        federation, result = self._federation, self.result
        for reason, clients in result.clients_by_reason().items():
            log.warning("round %d: %s dropped: %s", result.round, clients, reason)
        if problem := result.too_few(len(slots), needed=federation.policy.min_updates):
            raise TooFewUpdatesError(problem)
        models = {
            name: new_model(federation, self._starts[name], aggregation, name=name, result=result)
            for name, aggregation in self.models.items()
            if aggregation.received and not federation.strategy.server.keeps_model(name, aggregation.received)
        }
        for mod in federation.mods:
            result.features.update(mod.record(result.round, dropped=result.dropped))
        return new_state(federation, self._state, models, result=result, slots=slots, state_rounds=self._state_rounds)
