"""One round: from a state and the clients' updates to the next state.

A `Round` contains no algorithm. It calls the server side of the strategy for what the algorithm defines, and does
what is
the same for all: sampling, validation and ordering of replies, and the rows of the log. Every client is checked and
measured against the model that it started from.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from flwr.app import Message
from torch import Tensor

from fedssl.arrays import Cosines, Layers, ReferenceLayers
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.errors import InputError, RunError
from fedssl.waiting import sanitize_line
from fedssl.wire.messages import ARRAYS, ClientUpdate
from fedssl.wire.records import content_bytes, decode_arrays
from server_app.messaging import NO_REPLY, MessageExchange, ordered_by_client
from server_app.plans import PlanBuilder
from server_app.round_context import RoundContext
from server_app.secure_aggregation import TooFewParticipants, apply_delta, secure_mean_delta
from server_app.updates import (
    InvalidUpdate,
    apply_stale_update,
    check_update,
    norm_outliers,
    read_model_index,
    read_update,
)
from strategies.base import Aggregator, RoundOutcome
from strategies.state import GLOBAL, GlobalModel, ServerState, model_suffix
from strategies.weighted_sum import NO_COSINES, is_uniform_sum

log = logging.getLogger("fedssl")

UpdateObserver = Callable[[int, Layers], None]  # sees the client and the running layers of every update that is used


@dataclass(frozen=True)
class ClientMetrics:
    """What the server knows of one client's part in a round; the fields are the keys of ``clients.jsonl``.

    ``model`` is the name of the model that the client started from. ``cosine`` has that of every layer with it,
    ``model_cosine`` that of all weights as one vector (L-DAWA, Eq. 2 and Fig. 4), and ``layer_cosine`` the mean over
    layers, see `fedssl.arrays.Cosines`; None: no weights travelled. ``staleness`` counts the rounds since the plan
    that it answers.
    """

    round: int
    client: int
    model: str
    loss: float | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    examples: int | None
    cosine: dict[str, float]
    model_cosine: float | None
    layer_cosine: float | None
    staleness: int = 0


@dataclass(frozen=True)
class RoundResult:
    """Outcome of a round.

    Attributes
    ----------
    clients : list of ClientMetrics
        A row for each update that was used.
    dropped : dict of int to str
        The reason for each client whose update was not.
    late : list of int
        Clients that replied to an older plan, which was not used any more.
    privacy : dict
        Epsilon after this round, and its delta; empty without differential privacy.
    strategy_metrics : dict
        What the strategy found out, ready for JSON.
    """

    round: int
    clients: list[ClientMetrics] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    privacy: dict[str, float] = field(default_factory=dict)
    strategy_metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Aggregation:
    """What goes into a model: the rule's updates, what their clients had received, and what the method gathers."""

    aggregator: Aggregator
    received: dict[int, tuple[str, ...]] = field(default_factory=dict)
    gathered: list[Layers] = field(default_factory=list)


@dataclass(frozen=True)
class _ValidUpdate:
    """An update that passed its checks, how it compares to its start, what it took to send, and its age in rounds."""

    update: ClientUpdate
    cosines: Cosines
    bytes_up: int
    staleness: int = 0


class TooFewUpdatesError(RunError):
    """A round cannot go on with what is usable."""


class Round:
    """The round that follows a state.

    Parameters
    ----------
    context : RoundContext
    state : ServerState
    keep_from : int
        Oldest round that a resumed run may go back to.
    attempt : int
        How often it has been tried before.
    in_flight : collection of int
        Clients that are at work on an older plan and are not asked.

    Raises
    ------
    InputError
        Late updates are to be used, and the algorithm has no use for them.

    Attributes
    ----------
    number : int
        Of the round, from 1.
    messages : list of Message
        One for each client that trains.
    """

    def __init__(
        self,
        context: RoundContext,
        state: ServerState,
        *,
        keep_from: int = 0,
        attempt: int = 0,
        in_flight: Collection[int] = (),
    ) -> None:
        server = context.strategy.server
        self.number = state.round + 1
        self._cluster_models = server.models_to_cluster(state, self.number)
        state = state.with_models(self._cluster_models)
        self._context, self._state = context, state
        clients = context.sample(self.number, attempt=attempt, in_flight=in_flight)
        self._candidates = {client: server.candidate_models(state, self.number, client) for client in clients}
        self._start_models = {client: names[0] for client, names in self._candidates.items()}
        self._destinations: dict[int, tuple[str, ...]] = {}
        targets = dict.fromkeys(self._cluster_models or (GLOBAL,) * context.aggregation.buffered)
        for client, names in self._candidates.items():
            targets |= dict.fromkeys(into for name in names for into in self._targets(client, name))
        plans = PlanBuilder(context, state, candidates=self._candidates, extra_models=targets, keep_from=keep_from)
        self._starts, self._received, self._bytes_down = plans.starts, plans.downloaded_names, plans.bytes_down
        self.messages = plans.messages
        self._aggregations = {name: _Aggregation(server.aggregator(self.number, name)) for name in targets}
        self._client_features: dict[int, Tensor] = {}
        self._required_metrics = server.aggregator(self.number).required_metrics
        self._result = RoundResult(self.number)
        if context.aggregation.buffered:
            self._require_full_exchange("aggregation.buffered=true")
        if context.privacy:
            self._require_uniform_sum("privacy=central")
        if context.secure_aggregation:
            self._require_uniform_sum("secure_aggregation=secagg_plus")

    def finish(
        self,
        replies: Iterable[Message],
        *,
        late_replies: Sequence[tuple[Message, Message]] = (),
        observe: UpdateObserver | None = None,
    ) -> tuple[ServerState, RoundResult]:
        """Fold the replies in as they come, in order of the clients; bad updates are dropped and reported.

        Parameters
        ----------
        replies : iterable of Message
            To `messages`.
        late_replies : sequence of (Message, Message)
            Plans of earlier rounds and the replies to them; looked at when all of ``replies`` are there.
        observe : callable, optional
            Sees every update that is used.

        Raises
        ------
        TooFewUpdatesError
            Fewer updates than needed could be used.
        """
        for name, aggregation in self._aggregations.items():
            aggregation.aggregator.start(self._starts[name].expected_upload)
        clients = {self._context.nodes[client]: client for client in self._start_models}
        own = self._valid_updates(ordered_by_client(replies, sent=self.messages, clients=clients, drop=self._drop))
        usable: Iterable[_ValidUpdate] = chain(own, self._stale_updates(late_replies))
        if self._context.aggregation.max_norm_ratio is not None:
            usable = self._drop_outliers(list(usable), factor=self._context.aggregation.max_norm_ratio)
        if self._cluster_models:
            usable = self._assign_clusters(list(usable))
        for one in usable:
            self._accumulate(one, observe)
            del one  # a streamed update is a whole model: let it go before the next one is made
        return self._finalize()

    def finish_secure(
        self, exchange: MessageExchange, secure: SecureAggregationSettings
    ) -> tuple[ServerState, RoundResult]:
        """Let the clients train so that nobody sees more than the sum of their updates; raises `TooFewUpdatesError`."""
        context, clients = self._context, {node: client for client, node in self._context.nodes.items()}
        contents = {message.metadata.dst_node_id: message.content for message in self.messages}
        settings, start = context.aggregation, self._starts[GLOBAL]
        try:
            found = secure_mean_delta(
                exchange, contents, secure, round=self.number, timeout=context.timeout, deadline=settings.round_deadline
            )
            mean = ClientUpdate(
                layers=apply_delta(start.expected_upload.layers, found.delta), partition_id=clients[found.nodes[0]]
            )
        except TooFewParticipants as reason:
            raise TooFewUpdatesError(f"round {self.number}: {reason}") from reason
        for client in self._start_models.keys() - {clients[node] for node in found.nodes}:
            self._drop(client, NO_REPLY)
        aggregation = self._aggregations[GLOBAL]
        aggregation.aggregator.start(start.expected_upload)
        aggregation.aggregator.add(mean, start.expected_upload.cosines_of(mean.layers))
        for node in found.nodes:
            client = clients[node]
            self._destinations[client] = (GLOBAL,)
            aggregation.received[client] = self._received[client]
            self._bytes_down[client] = found.bytes_down[node]
            self._result.clients.append(
                self._client_row(_ValidUpdate(replace(mean, partition_id=client), NO_COSINES, found.bytes_up[node]))
            )
        return self._finalize()

    def _finalize(self) -> tuple[ServerState, RoundResult]:
        """The new state, if enough updates were used; raises `TooFewUpdatesError`."""
        if len(self._result.clients) < self._context.aggregation.min_updates:
            raise TooFewUpdatesError(self._too_few())
        server = self._context.strategy.server
        fed = {
            name: self._aggregate(name)
            for name, one in self._aggregations.items()
            if one.received and not server.keeps_model(name, one.received)
        }
        last_participation = {**self._state.last_participation}
        last_participation |= {row.client: (self.number - row.staleness, row.model) for row in self._result.clients}
        for client in self._result.dropped:  # nobody knows what it holds now
            last_participation.pop(client, None)
        if self._context.privacy:
            self._result.privacy.update(self._context.privacy.privacy_spent(self.number))
        state = replace(
            self._state, round=self.number, models={**self._state.models, **fed}, last_participation=last_participation
        )
        outcome = RoundOutcome(
            round=self.number,
            destinations={row.client: self._destinations[row.client] for row in self._result.clients},
            bytes_up={row.client: row.bytes_up for row in self._result.clients},
            client_features=self._client_features,
            extract_features=self._context.extract_features,
        )
        present = {name: self._context.advance_to_phase(model, self.number) for name, model in state.models.items()}
        strategy_state, strategy_metrics = server.on_round_end(replace(state, models=present), outcome)
        self._result.strategy_metrics.update(strategy_metrics)
        return replace(state, strategy_state=strategy_state), self._result

    def _targets(self, client: int, start: str) -> tuple[str, ...]:
        """Models that the client's update goes into, each once; none yet if updates are sorted when all are there."""
        if self._cluster_models:
            return ()
        return tuple(
            dict.fromkeys(self._context.strategy.server.destination_models(self._state, self.number, client, start))
        )

    # --- what is not possible ---

    def _require_uniform_sum(self, what: str) -> None:
        self._require_full_exchange(what)
        if not all(is_uniform_sum(aggregation.aggregator) for aggregation in self._aggregations.values()):
            raise InputError(
                f"{what} needs a rule that adds the clients up, each with the same weight: set strategy=fedavg "
                "strategy.weighting=uniform, or strategy=l_dawa strategy.scale_at=client"
            )
        if self._context.method.uploaded_parts:
            raise InputError(
                f"{what} does not cover what {type(self._context.method).__name__} gathers; set another method"
            )

    def _require_full_exchange(self, what: str) -> None:
        one_model = {*chain.from_iterable(self._candidates.values()), *self._aggregations} <= {GLOBAL}
        start = next(iter(self._starts.values()))
        whole = all(received == tuple(start.trainable) for received in self._received.values())
        if not (one_model and whole and start.upload_names is None and len(self._context.phases) == 1):
            raise InputError(
                f"{what} needs clients that all send and receive the whole model, and the strategy or "
                "the schedule has others; leave it out"
            )

    # --- replies ---

    def _valid_updates(self, replies: Iterable[tuple[int, Message]]) -> Iterator[_ValidUpdate]:
        """The updates that pass their checks; the others are dropped."""
        for client, reply in replies:
            names = self._candidates[client]
            try:
                self._start_models[client] = names[read_model_index(reply, among=len(names))]
            except InvalidUpdate as reason:
                self._drop(client, str(reason))
                continue
            self._destinations[client] = self._targets(client, self._start_models[client])
            yield from self._read_update(
                client, reply, expected=self._starts[self._start_models[client]].expected_upload, number=self.number
            )
            del reply

    def _read_update(
        self, client: int, reply: Message, *, expected: ReferenceLayers, number: int
    ) -> Iterator[_ValidUpdate]:
        """The update in the reply to the plan of a round, if it passes its checks; else the client is dropped."""
        context = self._context
        # A shortened layer comes back as what training changed. Added to the model as the server has it, it loses
        # nothing to what the way down has rounded, and compares with it as if nothing had been rounded.
        received = {layer: expected.layers[layer] for layer in self._received[client] if layer in expected.layers}
        try:
            update = read_update(
                reply, client, sent_to=context.nodes[client], wire_dtype=context.wire_dtype, start=received
            )
            cosines = check_update(
                update,
                expected=expected,
                gathered=context.gathered,
                required_metrics=self._required_metrics,
                plan=(number, context.code_fingerprint),
                max_examples=context.aggregation.max_examples,
            )
        except InvalidUpdate as reason:
            self._drop(client, str(reason))
            return
        yield _ValidUpdate(update, cosines, content_bytes(reply.content))

    def _stale_updates(self, late_replies: Iterable[tuple[Message, Message]]) -> Iterator[_ValidUpdate]:
        """The updates to plans of earlier rounds, as they are for the present model; not used unless asked for."""
        context, nodes = self._context, {node: client for client, node in self._context.nodes.items()}
        for plan, reply in sorted(late_replies, key=_by_staleness):
            client = nodes.get(plan.metadata.dst_node_id)
            if client is None or reply.has_error() or not context.aggregation.buffered:
                self._result.late.append(plan.metadata.dst_node_id if client is None else client)
                continue
            start, number = self._starts[GLOBAL], int(plan.metadata.group_id)
            start_layers = decode_arrays(plan.content.array_records[ARRAYS], context.wire_dtype)
            then = ReferenceLayers({name: start_layers[name] for name in start.expected_upload.layers})
            self._start_models[client], self._destinations[client], self._received[client] = (
                GLOBAL,
                (GLOBAL,),
                tuple(start_layers),
            )
            self._bytes_down[client] = content_bytes(plan.content)
            for one in self._read_update(client, reply, expected=then, number=number):
                staleness = self.number - number
                layers = apply_stale_update(
                    one.update.layers, start=then.layers, current=start.expected_upload.layers, staleness=staleness
                )
                cosines = start.expected_upload.cosines_of(layers)
                yield replace(one, update=replace(one.update, layers=layers), cosines=cosines, staleness=staleness)

    def _drop_outliers(self, usable: Sequence[_ValidUpdate], *, factor: float) -> Iterator[_ValidUpdate]:
        found = norm_outliers({one.update.partition_id: one.cosines.relative_change for one in usable}, factor=factor)
        for client, reason in found.items():
            self._drop(client, reason)
        return (one for one in usable if one.update.partition_id not in found)

    def _assign_clusters(self, usable: Sequence[_ValidUpdate]) -> Sequence[_ValidUpdate]:
        """The same updates, once it is known where they go."""
        ways: dict[int, Layers] = {}
        for one in usable:
            start_layers = self._starts[self._start_models[one.update.partition_id]].expected_upload.layers
            ways[one.update.partition_id] = {
                name: one.update.layers[name] - start_layers[name] for name in start_layers
            }
        found = self._context.strategy.server.assign_clusters(ways)
        self._destinations.update({client: (name,) for client, name in found.items()})
        return usable

    def _accumulate(self, one: _ValidUpdate, observe: UpdateObserver | None) -> None:
        update, client = one.update, one.update.partition_id
        whole = {**self._starts[self._start_models[client]].frozen, **update.layers}
        if self._context.strategy.server.num_comparison_images:
            self._client_features[client] = self._context.extract_features(whole)
        if self._context.privacy:
            start_layers = self._starts[self._start_models[client]].expected_upload.layers
            update = replace(update, layers=self._context.privacy.clip(update.layers, start_layers))
        for name in self._destinations[client]:
            aggregation = self._aggregations[name]
            aggregation.aggregator.add(update, one.cosines)
            aggregation.received[client] = self._received[client]
            aggregation.gathered.append(update.uploaded_parts)
        if observe is not None:
            observe(client, whole)
        self._result.clients.append(self._client_row(one))

    def _client_row(self, one: _ValidUpdate) -> ClientMetrics:
        update, cosines = one.update, one.cosines
        return ClientMetrics(
            round=self.number,
            client=update.partition_id,
            model=self._start_models[update.partition_id],
            loss=_finite(update.train_loss),  # NaN without a local epoch
            seconds=_finite(update.seconds),
            bytes_up=one.bytes_up,
            bytes_down=self._bytes_down[update.partition_id],
            examples=update.num_examples,
            cosine=cosines.weights,
            model_cosine=cosines.model if cosines.weights else None,
            layer_cosine=cosines.mean,
            staleness=one.staleness,
        )

    def _drop(self, client: int, reason: str) -> None:
        reason = sanitize_line(reason, max_chars=500)
        self._result.dropped[client] = reason
        log.warning("client %d dropped: %s", client, reason)

    def _too_few(self) -> str:
        clients: dict[str, list[str]] = {}
        for client, reason in self._result.dropped.items():
            clients.setdefault(reason, []).append(str(client))
        reasons = "; ".join(f"client {', '.join(ids)}: {reason}" for reason, ids in clients.items())
        used, needed = len(self._result.clients), self._context.aggregation.min_updates
        sent = f"{used or 'none'} of {len(self._start_models)} clients sent a usable update"
        needed_text = f" and aggregation.min_updates={needed} are needed" if used else ""
        return f"round {self.number}: {sent}{needed_text} ({reasons})"

    # --- the new state ---

    def _aggregate(self, name: str) -> GlobalModel:
        """The model after the round."""
        context, start, one = self._context, self._starts[name], self._aggregations[name]
        model = start.model
        mean = one.aggregator.finish()
        if context.privacy:
            mean = context.privacy.add_noise(
                mean, start.expected_upload.layers, used=len(one.received), round=self.number
            )
        server_optimizer_state, new = context.server_optimizer.step(
            model.server_optimizer_state, model.num_updates + 1, start.expected_upload.layers, mean
        )
        trained = {**start.trainable, **new}
        strategy_state, strategy_metrics = context.strategy.server.after_aggregation(
            model, self.number, trained, aggregator=one.aggregator, received=one.received
        )
        self._result.strategy_metrics.update(
            {f"{key}{model_suffix(name)}": value for key, value in strategy_metrics.items()}
        )
        shared = context.method.aggregate_parts(one.gathered, model.broadcast)
        model = replace(
            model,
            layers={**model.layers, **trained},
            broadcast=shared,
            strategy_state=strategy_state,
            server_optimizer_state=server_optimizer_state,
            num_updates=model.num_updates + 1,
        )
        return context.calibrate_if_due(model, self.number, when="end")


def _by_staleness(pair: tuple[Message, Message]) -> tuple[int, int]:
    return int(pair[0].metadata.group_id), pair[0].metadata.dst_node_id


def _finite(value: float | None) -> float | None:
    """None for what JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
