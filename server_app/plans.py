"""The plans of a round: what every client starts from, what of it the client lacks, and the messages that bring it."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from flwr.app import ArrayRecord, Message, RecordDict

from fedssl.arrays import Layers, ReferenceLayers
from fedssl.model_arrays import part_name
from fedssl.schedule.phases import phase_at
from fedssl.wire.messages import TrainPlan
from fedssl.wire.records import content_bytes, encode_arrays
from server_app.round_context import RoundContext
from strategies.state import GlobalModel, ServerState


@dataclass(frozen=True)
class StartingModel:
    """A model as the round finds it: what its clients train, only use, and send back (None: all that they train)."""

    model: GlobalModel
    trainable: Layers
    frozen: Layers
    upload_names: tuple[str, ...] | None
    expected_upload: ReferenceLayers


class PlanBuilder:
    """What goes out in the round that follows a state.

    Parameters
    ----------
    context : RoundContext
    state : ServerState
    candidates : mapping of int to tuple of str
        For each client that trains, names of the models of which it chooses its start; often there is one.
    extra_models : iterable of str
        Names of other models that updates will go into.
    keep_from : int
        Oldest round that a resumed run may go back to.

    Attributes
    ----------
    starts : dict of str to StartingModel
    downloaded_names : dict of int to tuple of str
        Names of the trained layers that a client receives.
    bytes_down : dict of int to int
    messages : list of Message
        One for each client, in order.
    """

    def __init__(
        self,
        context: RoundContext,
        state: ServerState,
        *,
        candidates: Mapping[int, tuple[str, ...]],
        extra_models: Iterable[str],
        keep_from: int,
    ) -> None:
        self._context, self._state = context, state
        self._number = state.round + 1
        self._phase = phase_at(context.phases, self._number)
        untrained = functools.cache(context.initial_model)  # made once, and only if it is needed
        names = dict.fromkeys([*chain.from_iterable(candidates.values()), *extra_models])
        self.starts = {name: self._start(state.models.get(name) or untrained()) for name in names}
        self._models: dict[tuple[str, tuple[str, ...]], Layers] = {}
        self._packed: dict[int, ArrayRecord] = {}  # by the ids of these models
        self.downloaded_names: dict[int, tuple[str, ...]] = {}
        self.bytes_down: dict[int, int] = {}
        self.messages = list(self._plans(candidates, keep_from=keep_from))

    def _start(self, model: GlobalModel) -> StartingModel:
        context = self._context
        model = context.calibrate_if_due(context.advance_to_phase(model, self._number), self._number, when="start")
        layers = model.layers
        trained = {layer: layers[layer] for layer in context.stages.trained(self._phase, layers)}
        frozen = {layer: layers[layer] for layer in context.stages.frozen(self._phase, layers)}
        up = context.strategy.server.upload_names(model, self._number, trained)
        sent = ReferenceLayers(trained if up is None else {layer: trained[layer] for layer in up})
        return StartingModel(model, trained, frozen, up, sent)

    def _plans(self, candidates: Mapping[int, tuple[str, ...]], *, keep_from: int) -> Iterator[Message]:
        context = self._context
        plan = TrainPlan(
            round=self._number,
            layers={},
            settings=context.client_config,
            metrics=context.requested_metrics(self._number),
            oldest_resumable_round=keep_from,
            code_fingerprint=context.code_fingerprint,
            wire_dtype=context.wire_dtype,
            lr_factor=context.lr_factor(self._number),
        )
        contents: dict[tuple[tuple[str, ...], ...], RecordDict] = {}  # clients that receive the same share a record
        for client, names in candidates.items():
            start = self.starts[names[0]]
            # Of several models a client has none by itself: it does not know which it will take.
            last = self._state.last_round(client, names[0]) if len(names) == 1 else None
            chosen = context.strategy.server.download_names(start.model, self._number, start.trainable, last)
            self.downloaded_names[client] = tuple(start.trainable) if chosen is None else chosen
            down = (*self._missing_frozen(start, last), *self.downloaded_names[client])
            shared = self._broadcast_for(start.model, last)
            key = (names, down, tuple(shared))
            if key not in contents:
                models = [self._subset(name, down) for name in names]
                one = replace(
                    plan,
                    layers=models[0],
                    candidate_arrays=tuple(models[1:]),
                    broadcast=shared,
                    upload_names=start.upload_names,
                )
                contents[key] = self._in_phase(one, start).to_content(self._encode)
            content = contents[key]
            self.bytes_down[client] = content_bytes(content)
            yield Message(content, context.nodes[client], "train", group_id=str(self._number))

    def _subset(self, name: str, down: tuple[str, ...]) -> Layers:
        """These layers of a model; the same object for all clients."""
        if (name, down) not in self._models:
            self._models[name, down] = {layer: self.starts[name].model.layers[layer] for layer in down}
        return self._models[name, down]

    def _encode(self, layers: Layers, wire_dtype: str) -> ArrayRecord:
        """The record of a model, made once, in whatever place clients are offered it."""
        if id(layers) not in self._packed:
            self._packed[id(layers)] = encode_arrays(layers, wire_dtype)
        return self._packed[id(layers)]

    def _in_phase(self, plan: TrainPlan, start: StartingModel) -> TrainPlan:
        """The plan with what a client must know of the phase, if there are several."""
        phase = self._phase
        if len(self._context.phases) == 1:
            return plan
        return replace(
            plan,
            upload_names=tuple(start.expected_upload.layers),
            num_stages=phase.depth,
            num_frozen_stages=phase.frozen,
            cache_frozen=self._context.clients_cache_frozen,
            depth_dropout=phase.depth_dropout,
        )

    def _broadcast_for(self, model: GlobalModel, last: int | None) -> Layers:
        """What the method's server side gives to a client, but for what this holds from an earlier round."""
        held = () if last is None else self._context.method.static_parts
        return {layer: array for layer, array in model.broadcast.items() if part_name(layer) not in held}

    def _missing_frozen(self, start: StartingModel, last: int | None) -> tuple[str, ...]:
        """Those of the frozen layers that a client does not have from a round in which they were frozen already.

        LW-FedSSL's Table 2 (Tun et al., arXiv 2401.11647) follows from what a client lacks, and so does what one that
        joins late or missed a stage has to receive (end of Section 5.2). With calibration the server changes all stages
        in every round, so that they travel down every time.
        """
        if last is None or not self._context.clients_cache_frozen:
            return tuple(start.frozen)
        held = self._context.stages.frozen(phase_at(self._context.phases, last), start.frozen)
        return tuple(name for name in start.frozen if name not in held)
