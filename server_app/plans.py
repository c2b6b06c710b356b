"""The plans of a round: the models that clients start from, the layers that they lack, and where their updates go."""

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from flwr.app import ArrayRecord, RecordDict

from fedssl.arrays import GlobalLayers, Layers
from fedssl.availability import Workload
from fedssl.errors import InputError, shortened
from fedssl.schedule.phases import phase_at
from fedssl.wire.device import code_fingerprint
from fedssl.wire.messages import BASE, TrainPlan, with_last_used_round
from fedssl.wire.records import EXACT, Codec, content_bytes, layer_bytes, record_bytes
from server_app.federation import Federation
from strategies.base import ServerStrategy
from strategies.mods.base import exchanged_layers
from strategies.round_start import ClientAssignment, RoundStart, StartingModel, UntrainedLayers
from strategies.rules import RoundExchange
from strategies.types import GlobalModel, ServerState

_START = "candidate_models (or starting_model)"


def _names(server: ServerStrategy, hook: str, names: object, *, known: Layers | None = None) -> tuple[str, ...]:
    """Return the names that a hook of a strategy returns; `InputError` unless they are several known strings."""
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in found):
        raise InputError(f"{hook} of {type(server).__name__} returns {names!r:.100}; return a tuple of names")
    if known is not None and not known.keys() >= {*found}:
        raise InputError(
            f"{hook} of {type(server).__name__} returns {shortened(found)}; return some of the layers "
            f"{shortened(known)}"
        )
    return found


class Routes:
    """Routes of the updates of a round, which the server side of the strategy decides.

    ``clusters`` are the models among which updates are divided after all have arrived; usually there are none.
    ``late`` are those that may receive late updates, ``candidates`` those from which each client selects its start, and
    ``models`` those that the round changes.
    """

    def __init__(
        self,
        server: ServerStrategy,
        state: ServerState,
        clients: Sequence[int],
        *,
        round: int,
        clusters: tuple[str, ...],
        late: tuple[str, ...],
    ) -> None:
        self._server, self._state, self._round, self._sampled = server, state, round, frozenset(clients)
        self.clusters = clusters
        self.candidates = {
            client: _names(server, _START, server.candidate_models(state, round, client)) for client in clients
        }
        self.models = dict.fromkeys(self.clusters or late)
        for client, names in self.candidates.items():
            self.models |= dict.fromkeys(into for name in names for into in self.destinations(client, name))

    def destinations(self, client: int, start: str) -> tuple[str, ...]:
        """Return the models that a client's update goes into; none if updates are clustered."""
        if self.clusters:
            return ()
        found = self._server.destination_models(self._state, self._round, client, start)
        names = dict.fromkeys(_names(self._server, "destination_models", found))
        if self._server.models_per_client:  # a client that is not sampled keeps its model
            return tuple(name for name in names if int(name) in self._sampled)
        return tuple(names)


class PlanBuilder:
    """Builder of the slots of the round that follows a state, and of the contents of its messages, by client in order.

    ``candidates`` are the models from which each client selects its start, and ``extra_models`` further models that
    updates go into. ``attempt`` is the number of earlier attempts at the round.
    """

    def __init__(
        self,
        federation: Federation,
        state: ServerState,
        *,
        candidates: Mapping[int, tuple[str, ...]],
        extra_models: Iterable[str],
        oldest_resumable: int,
        attempt: int = 0,
    ) -> None:
        context, self._context, self._federation = federation.context, federation.context, federation
        self._state = state
        self._at = RoundStart(
            context=context,
            state=state,
            nodes=federation.nodes,
            info=federation.directory.info,
            attempt=attempt,
        )
        self._number = state.round + 1
        self._phase = phase_at(context.phases, self._number)
        untrained = functools.cache(context.initial_model)  # made once, and only if it is needed
        names = dict.fromkeys([*chain.from_iterable(candidates.values()), *extra_models])
        self.starts = {name: self._start(state.models.get(name) or untrained()) for name in names}
        self._models: dict[tuple[str, tuple[str, ...], tuple[Hashable, ...]], Layers] = {}
        self._packed: dict[int, ArrayRecord] = {}  # by the ids of these models
        self.slots: dict[int, ClientAssignment] = {}
        self.contents: dict[int, RecordDict] = {}
        self._plan_clients(candidates, oldest_resumable=oldest_resumable)

    def _start(self, model: GlobalModel) -> StartingModel:
        context = self._context
        model = context.advance_to_phase(model, self._number)
        for mod in self._federation.mods:
            model = mod.begin(model, self._number)
        layers = model.layers
        trained = {layer: layers[layer] for layer in context.stages.trained(self._phase, layers)}
        frozen = {layer: layers[layer] for layer in context.stages.frozen(self._phase, layers)}
        server = self._federation.strategy.server
        up = server.upload_names(model, self._number, trained)
        if up is not None:
            up = _names(server, "upload_names", up, known=trained)
        uploaded = trained if up is None else {layer: trained[layer] for layer in up}
        return StartingModel(
            model,
            trained,
            frozen,
            up,
            context.global_layers(uploaded),
            strategy_arrays=server.arrays_to_send(model, trained),
            expected_arrays=GlobalLayers(server.arrays_to_receive(model, uploaded)),
        )

    def _plan_clients(self, candidates: Mapping[int, tuple[str, ...]], *, oldest_resumable: int) -> None:
        context, federation = self._context, self._federation
        plan = TrainPlan(
            round=self._number,
            layers={},
            settings=context.client_config,
            metrics=federation.requested_metrics(self._number),
            oldest_resumable_round=oldest_resumable,
            code_fingerprint=code_fingerprint(),
            lr_factor=context.lr_factor(self._number),
            evicted_clients=tuple(client for client in candidates if client in self._state.evicted),
        )
        for mod in federation.mods:
            plan = mod.plan(plan)
        contents: dict[tuple[object, ...], RecordDict] = {}  # clients that receive the same share a record
        for client, names in candidates.items():
            start = self.starts[names[0]]
            # With several candidates nothing is known about the layers that the client holds.
            last = self._state.last_round(client, names[0]) if len(names) == 1 else None
            chosen = federation.strategy.server.download_names(start.model, self._number, start.trainable, last)
            downloaded = tuple(start.trainable)
            if chosen is not None:
                downloaded = _names(federation.strategy.server, "download_names", chosen, known=start.trainable)
            sent = UntrainedLayers(frozen=tuple(start.frozen), broadcast=start.model.broadcast)
            for mod in federation.mods:
                sent = mod.send(sent, client, self._at, last=last)
            down = (*sent.frozen, *downloaded)
            variants = tuple(mod.variant(client, self._at) for mod in federation.mods)
            key = (names, down, tuple(sent.broadcast), tuple(sent.base), variants)
            if key not in contents:
                models = [self._subset(name, down, variants) for name in names]
                client_plan = replace(
                    plan,
                    layers=models[0],
                    candidate_arrays=tuple(models[1:]),
                    broadcast=sent.broadcast,
                    strategy_arrays=start.strategy_arrays,
                    base=sent.base,
                    upload_names=start.upload_names,
                )
                contents[key] = self._in_phase(client_plan, start).to_content(context.codec, encode=self._encode)
            content = contents[key]
            if context.is_deployment:
                content = with_last_used_round(content, self._state.last_used_round(client))
            self.contents[client] = content
            self.slots[client] = ClientAssignment(
                client,
                names,
                names[0],
                downloaded,
                bytes_down=content_bytes(content),
                base_bytes=record_bytes(content.array_records[BASE]) if sent.base else 0,
                variants=variants,
            )

    def exchange(self, models: Iterable[str]) -> RoundExchange:
        """Return what the clients exchange, for rules. ``models`` are changed by the round."""
        slots, start = self.slots.values(), next(iter(self.starts.values()))
        downloads_all = all(slot.downloaded == tuple(start.trainable) for slot in slots)
        in_parts = self._federation.strategy.server.exchanges_parts or len(self._context.phases) > 1  # later, perhaps
        return RoundExchange(
            models={*chain.from_iterable(slot.candidates for slot in slots), *models},
            is_complete=downloads_all and start.upload_names is None and not in_parts,
        )

    def _subset(self, name: str, down: tuple[str, ...], variants: tuple[Hashable, ...]) -> Layers:
        if (name, down, variants) not in self._models:
            layers = {layer: self.starts[name].model.layers[layer] for layer in down}
            self._models[name, down, variants] = exchanged_layers(self._federation.mods, layers, variants)
        return self._models[name, down, variants]

    def _encode(self, codec: Codec, layers: Layers) -> ArrayRecord:
        if id(layers) not in self._packed:
            self._packed[id(layers)] = codec.encode(layers)
        return self._packed[id(layers)]

    def _in_phase(self, plan: TrainPlan, start: StartingModel) -> TrainPlan:
        """Return the plan with the fields of the phase, if there are several phases or frozen stages."""
        phase, num_phases = self._phase, len(self._context.phases)
        if num_phases > 1 or start.frozen:
            plan = replace(plan, upload_names=tuple(start.expected_upload.layers))
        if num_phases == 1 and not phase.frozen:
            return plan
        return replace(
            plan,
            num_stages=phase.depth,
            num_frozen_stages=phase.frozen,
            depth_dropout=phase.depth_dropout,
        )


def client_workloads(
    federation: Federation,
    number: int,
    *,
    starts: Mapping[str, StartingModel],
    slots: Mapping[int, ClientAssignment],
    contents: Mapping[int, RecordDict],
) -> dict[int, Workload]:
    """Return the work of every client of a round by node, for virtual time.

    Bytes are those of layers: other contents of messages, such as paths, differ between equal runs.
    """
    context = federation.context
    phase = phase_at(context.phases, number)
    distinct = {id(content): content for content in contents.values()}
    bytes_down = {key: layer_bytes(content) for key, content in distinct.items()}
    parts = record_bytes(EXACT.encode(context.gathered.layers))
    bytes_up = {
        (name, variants): parts
        + _strategy_bytes(starts[name])
        + record_bytes(
            context.codec.encode(exchanged_layers(federation.mods, starts[name].expected_upload.layers, variants))
        )
        for name, variants in {(slot.start, slot.variants) for slot in slots.values()}
    }
    return {
        federation.nodes[client]: Workload(
            client=client,
            round=number,
            flops=federation.client_flops(phase, client),
            bytes_down=bytes_down[id(contents[client])],
            bytes_up=bytes_up[slot.start, slot.variants],
        )
        for client, slot in slots.items()
    }


def _strategy_bytes(start: StartingModel) -> int:
    """Return the size of the arrays that a client uploads to the strategy's server side."""
    arrays = start.expected_arrays.layers
    return record_bytes(EXACT.encode(arrays)) if arrays else 0
