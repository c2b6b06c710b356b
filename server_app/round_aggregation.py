"""The aggregation of a round: its updates, one by one or as sums, become new models, the next state and metrics."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedssl.arrays import Layers
from fedssl.errors import InputError
from fedssl.logs import log
from server_app.client_models import ClientModels, MappedValues
from server_app.exchanges.base import Sum, TooFewUpdatesError
from server_app.exchanges.sums import LostSumError
from server_app.federation import Federation
from server_app.updates import RoundResult, ValidUpdate
from strategies.base import ServerStrategy
from strategies.round_start import ClientAssignment, StartingModel
from strategies.types import (
    GLOBAL,
    AggregatedModel,
    Aggregator,
    GlobalModel,
    Mergeable,
    RoundOutcome,
    ServerState,
    model_suffix,
)
from strategies.update_store import CollectingAggregator, UpdateStorage

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
        if problem := result.too_few(
            len(slots), needed=federation.policy.needed_updates(rejected=len(result.rejected))
        ):
            raise TooFewUpdatesError(problem, dropped=result.dropped)
        models = {
            name: new_model(federation, self._starts[name], aggregation, name=name, result=result)
            for name, aggregation in self.models.items()
            if aggregation.received and not federation.strategy.server.keeps_model(name, aggregation.received)
        }
        for mod in federation.mods:
            result.features.update(mod.record(result.round, dropped=result.dropped))
        return new_state(federation, self._state, models, result=result, slots=slots, state_rounds=self._state_rounds)


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


def _pair(server: ServerStrategy, hook: str, found: object) -> tuple[Any, Any]:
    """Return the two values that a hook of a strategy returns; raises `InputError`."""
    if isinstance(found, tuple | list) and len(found) == 2:
        return found[0], found[1]
    raise InputError(
        f"{hook} of {type(server).__name__} returns a {type(found).__name__}; return a tuple of two values, see "
        "strategies.base.ServerStrategy"
    )


def _state_and_metrics(server: ServerStrategy, hook: str, found: object) -> tuple[Any, dict[str, Any]]:
    """Return the state of a hook, and its metrics as plain values, None if they are not finite; raises `InputError`."""
    state, metrics = _pair(server, hook, found)
    try:
        return state, dict(
            json.loads(json.dumps(metrics, default=lambda value: value.tolist()), parse_constant=lambda _: None)
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{hook} of {type(server).__name__} returns the metrics {metrics!r:.200}; return a dictionary of numbers, "
            "texts and lists"
        ) from error


def _server_step(server: ServerStrategy, done: AggregatedModel) -> tuple[Layers, Any]:
    """Return the layers and the state of `ServerStrategy.server_step`; `InputError` for layers of another form."""
    layers, state = _pair(server, "server_step", server.server_step(done))
    if not isinstance(layers, Mapping):
        raise InputError(f"server_step of {type(server).__name__} returns a {type(layers).__name__}; return layers")
    for name, array in layers.items():
        like, form = done.layers.get(name), (getattr(array, "dtype", None), np.shape(array))
        if like is None or form != (like.dtype, like.shape):
            raise InputError(
                f"server_step of {type(server).__name__} returns {name} of {form[0]} and shape {form[1]}; return "
                "layers of the model in their dtypes and shapes"
            )
    return dict(layers), state


def new_model(
    federation: Federation, start: StartingModel, aggregation: ModelAggregation, *, name: str, result: RoundResult
) -> GlobalModel:
    """Return a model after its aggregation, and add the metrics of the strategy to the result."""
    model, server = start.model, federation.strategy.server
    new = aggregation.aggregator.finish()
    done = AggregatedModel(
        model=model,
        round=result.round,
        layers={layer: new.get(layer, array) for layer, array in start.trainable.items()},
        aggregator=aggregation.inner,
        received=aggregation.received,
        num_clients=federation.num_trained_clients,
    )
    if server.has_server_step:
        layers, state = _server_step(server, done)
        done, new = replace(done, model=replace(model, strategy_state=state)), {**new, **layers}
    states = {**model.mod_states}
    for mod in federation.mods:
        key, used = type(mod).__name__, len(aggregation.received)
        new, states[key] = mod.finish(new, start, states.get(key, {}), used=used, round=result.round)
    trained = {layer: new.get(layer, array) for layer, array in start.trainable.items()}
    found = server.after_aggregation(replace(done, layers=trained))
    strategy_state, strategy_metrics = _state_and_metrics(server, "after_aggregation", found)
    suffix = model_suffix(name)
    result.strategy_metrics.update({f"{key}{suffix}": value for key, value in strategy_metrics.items()})
    model = replace(
        model,
        layers={**model.layers, **new},
        broadcast={
            **model.broadcast,
            **federation.context.method.aggregate_parts(aggregation.gathered, model.broadcast),
        },
        strategy_state=strategy_state,
        mod_states={mod: state for mod, state in states.items() if state},
        num_updates=model.num_updates + 1,
    )
    for mod in federation.mods:
        model = mod.end(model, result.round)
    return model


def new_state(
    federation: Federation,
    state: ServerState,
    aggregated: Mapping[str, GlobalModel],
    *,
    result: RoundResult,
    slots: Mapping[int, ClientAssignment],
    state_rounds: dict[int, int],
) -> ServerState:
    """Return the state after a round with its new models, and add the metrics of the strategy to the result.

    ``state_rounds`` are those of the state with the new ones of the clients whose updates are used.
    """
    participated = {row.client: slots[row.client] for row in result.clients}
    last_participation = {**state.last_participation}
    last_participation |= {row.client: (result.round - row.staleness, row.model) for row in result.clients}
    used = {row.client for row in result.clients}
    dropped = {client: round for client, round in state.dropped.items() if client not in used}
    for client in result.dropped:  # its state is unknown
        dropped[client] = state.last_used_round(client)
        last_participation.pop(client, None)
        state_rounds.pop(client, None)
    known = state.models
    state = replace(
        state,
        round=result.round,
        models=known.updated(aggregated) if isinstance(known, ClientModels) else {**known, **aggregated},
        last_participation=last_participation,
        dropped=dropped,
        state_rounds=state_rounds,
    )
    outcome = RoundOutcome(
        round=result.round,
        destinations={client: slot.destinations for client, slot in participated.items()},
        bytes_up={row.client: row.bytes_up for row in result.clients},
        client_features={client: slot.features for client, slot in participated.items() if slot.features is not None},
        extract_features=federation.extract_features,
    )
    current = MappedValues(state.models, lambda model: federation.context.advance_to_phase(model, result.round))
    server = federation.strategy.server
    found = server.on_round_end(replace(state, models=current), outcome)
    strategy_state, strategy_metrics = _state_and_metrics(server, "on_round_end", found)
    result.strategy_metrics.update(strategy_metrics)
    return replace(state, strategy_state=strategy_state)
