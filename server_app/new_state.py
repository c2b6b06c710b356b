"""The aggregation of each model in a round, and the models and the state of the server after it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedssl.arrays import Layers
from server_app.client_models import ClientModels, MappedValues
from server_app.federation import Federation
from server_app.updates import RoundResult
from strategies.round_start import ClientAssignment, StartingModel
from strategies.types import AggregatedModel, Aggregator, GlobalModel, RoundOutcome, ServerState, model_suffix
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
        layers, state = server.server_step(done)
        done, new = replace(done, model=replace(model, strategy_state=state)), {**new, **layers}
    states = {**model.mod_states}
    for mod in federation.mods:
        key, used = type(mod).__name__, len(aggregation.received)
        new, states[key] = mod.finish(new, start, states.get(key, {}), used=used, round=result.round)
    trained = {layer: new.get(layer, array) for layer, array in start.trainable.items()}
    strategy_state, strategy_metrics = server.after_aggregation(replace(done, layers=trained))
    suffix = model_suffix(name)
    result.strategy_metrics.update({f"{key}{suffix}": value for key, value in strategy_metrics.items()})
    model = replace(
        model,
        layers={**model.layers, **new},
        broadcast=federation.context.method.aggregate_parts(aggregation.gathered, model.broadcast),
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
    for client in result.dropped:  # its state is unknown
        last_participation.pop(client, None)
        state_rounds.pop(client, None)
    known = state.models
    state = replace(
        state,
        round=result.round,
        models=known.updated(aggregated) if isinstance(known, ClientModels) else {**known, **aggregated},
        last_participation=last_participation,
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
    strategy_state, strategy_metrics = federation.strategy.server.on_round_end(replace(state, models=current), outcome)
    result.strategy_metrics.update(strategy_metrics)
    return replace(state, strategy_state=strategy_state)
