"""One round: plans down, updates up, and of the server's state the next one.

A `Round` knows no algorithm: it asks the halves of a strategy what they define, and does itself what is the same for
all: who trains, what a client of a phase lacks, which replies count and in which order, and the rows of the log. Every
client is checked and measured against the model that it started from.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.errors import RunFailed
from fedssl.layers import Cosines, GlobalLayers, Layers
from fedssl.messages import ClientUpdate, TrainPlan
from fedssl.records import content_bytes
from fedssl.schedule.phases import phase_at
from server_app.federation import Federation
from server_app.plausible import implausible
from server_app.replies import BadUpdate, check_update, in_order, read_update, receive
from server_app.report import ClientRow, RoundReport
from strategies.base import Rule
from strategies.state import Model, ServerState, suffix

log = logging.getLogger("fedssl")

Observe = Callable[[int, Layers], None]  # sees the client and the running layers of every update that is used


@dataclass(frozen=True)
class _Start:
    """A model as the round finds it: what its clients train, only use, and send back (None: all that they train)."""

    model: Model
    trained: Layers
    frozen: Layers
    up: tuple[str, ...] | None
    sent: GlobalLayers


@dataclass(frozen=True)
class _Aggregation:
    """What goes into a model: the rule's updates, what their clients had received, and what the method gathers."""

    rule: Rule
    received: dict[int, tuple[str, ...]] = field(default_factory=dict)
    gathered: list[Layers] = field(default_factory=list)


@dataclass(frozen=True)
class _Usable:
    """An update that passed its checks, how it compares to its start, and what it took to send."""

    update: ClientUpdate
    cosines: Cosines
    bytes_up: int


def run_round(
    grid: Grid,
    federation: Federation,
    state: ServerState,
    *,
    keep_from: int = 0,
    observe: Observe | None = None,
) -> tuple[ServerState, RoundReport]:
    """The round after ``state``, from sampling to the new state; parameters as in `Round` and `Round.end`."""
    one = Round(federation, state, keep_from=keep_from)
    return one.end(receive(grid, one.messages, timeout=federation.timeout), observe=observe)


class Round:
    """The round that follows a state.

    Parameters
    ----------
    federation : Federation
    state : ServerState
    keep_from : int
        Oldest round that a resumed run may go back to.

    Attributes
    ----------
    number : int
        Of the round, from 1.
    messages : list of Message
        One for each client that trains.
    """

    def __init__(self, federation: Federation, state: ServerState, *, keep_from: int = 0) -> None:
        self._federation, self._state = federation, state
        self.number = state.round + 1
        self._phase = phase_at(federation.phases, self.number)
        server = federation.strategy.server
        clients = federation.sample(self.number)
        self._start_of = {client: server.start_of(state, self.number, client) for client in clients}
        self._into = {client: dict.fromkeys(server.into(state, self.number, client)) for client in clients}
        targets = dict.fromkeys(name for names in self._into.values() for name in names)
        untrained = functools.cache(federation.untrained)  # made once, and only if it is needed
        names = dict.fromkeys([*self._start_of.values(), *targets])
        self._starts = {name: self._start(state.models.get(name) or untrained()) for name in names}
        self._aggregations = {name: _Aggregation(server.rule(self.number)) for name in targets}
        self._needs = server.rule(self.number).needs
        self._received: dict[int, tuple[str, ...]] = {}
        self._bytes_down: dict[int, int] = {}
        self._report = RoundReport(self.number)
        self.messages = list(self._plans(keep_from=keep_from))

    def end(self, replies: Iterable[Message], *, observe: Observe | None = None) -> tuple[ServerState, RoundReport]:
        """Fold the replies in as they come, in order of partition ids; bad updates are dropped and reported.

        Raises
        ------
        RunFailed
            No update could be used.
        """
        for name, aggregation in self._aggregations.items():
            aggregation.rule.start(self._starts[name].sent)
        clients = {self._federation.nodes[client]: client for client in self._start_of}
        usable = self._usable(in_order(replies, sent=self.messages, clients=clients, drop=self._drop))
        if self._federation.limits.norm_factor is not None:
            usable = self._plausible(list(usable), factor=self._federation.limits.norm_factor)
        for one in usable:
            self._fold(one, observe)
            del one  # a streamed update is a whole model: let it go before the next one is made
        if not self._report.clients:
            raise RunFailed(self._nothing_usable())
        fed = {name: self._aggregate(name) for name, one in self._aggregations.items() if one.received}
        took_part = {**self._state.took_part}
        took_part |= {row.client: (self.number, row.model) for row in self._report.clients}
        for client in self._report.dropped:  # nobody knows what it holds now
            took_part.pop(client, None)
        models = {**self._state.models, **fed}
        return ServerState(round=self.number, models=models, took_part=took_part), self._report

    # --- plans ---

    def _start(self, model: Model) -> _Start:
        federation = self._federation
        model = federation.calibrated(federation.in_phase(model, self.number), self.number, at="start")
        layers = model.layers
        trained = {layer: layers[layer] for layer in federation.stages.trained(self._phase, layers)}
        frozen = {layer: layers[layer] for layer in federation.stages.frozen(self._phase, layers)}
        up = federation.strategy.server.up(model, self.number, trained)
        sent = GlobalLayers(trained if up is None else {layer: trained[layer] for layer in up})
        return _Start(model, trained, frozen, up, sent)

    def _plans(self, *, keep_from: int) -> Iterator[Message]:
        federation = self._federation
        plan = TrainPlan(
            round=self.number,
            layers={},
            settings=federation.settings,
            metrics=federation.reported(self.number),
            keep_from=keep_from,
            code=federation.code,
            transport=federation.transport,
            lr_factor=federation.lr_factor(self.number),
        )
        contents: dict[tuple[str, tuple[str, ...]], RecordDict] = {}  # clients that receive the same share a record
        for client, name in self._start_of.items():
            start = self._starts[name]
            last = self._state.last_round(client, name)
            chosen = federation.strategy.server.down(start.model, self.number, start.trained, last)
            self._received[client] = tuple(start.trained) if chosen is None else chosen
            down = (*self._lacks(start, last), *self._received[client])
            layers = {layer: start.model.layers[layer] for layer in down}
            if (name, down) not in contents:
                contents[name, down] = self._in_phase(
                    replace(plan, layers=layers, shared=start.model.shared, up=start.up), start
                ).to_content()
            content = contents[name, down]
            self._bytes_down[client] = content_bytes(content)
            yield Message(content, federation.nodes[client], "train", group_id=str(self.number))

    def _in_phase(self, plan: TrainPlan, start: _Start) -> TrainPlan:
        """The plan with what a client must know of the phase, if there are several."""
        phase = self._phase
        if len(self._federation.phases) == 1:
            return plan
        return replace(
            plan,
            up=tuple(start.sent.layers),
            depth=phase.depth,
            frozen=phase.frozen,
            hold=self._federation.hold,
            depth_dropout=phase.dropout,
        )

    def _lacks(self, start: _Start, last: int | None) -> tuple[str, ...]:
        """Those of the frozen layers that a client does not have from a round in which they were frozen already.

        LW-FedSSL's Table 2 (Tun et al., arXiv 2401.11647) follows from what a client lacks, and so does what one that
        joins late or missed a stage has to receive (end of Section 5.2). With calibration the server changes all stages
        in every round, so that they travel down every time.
        """
        if last is None or not self._federation.hold:
            return tuple(start.frozen)
        held = self._federation.stages.frozen(phase_at(self._federation.phases, last), start.frozen)
        return tuple(name for name in start.frozen if name not in held)

    # --- replies ---

    def _usable(self, replies: Iterable[tuple[int, Message]]) -> Iterator[_Usable]:
        """The updates that pass their checks; the others are dropped."""
        federation = self._federation
        for client, reply in replies:
            start = self._starts[self._start_of[client]]
            # A shortened layer comes back as what training changed. Added to the model as the server has it, it loses
            # nothing to what the way down has rounded, and compares with it as if nothing had been rounded.
            sent = start.sent.layers
            received = {layer: sent[layer] for layer in self._received[client] if layer in sent}
            try:
                update = read_update(
                    reply, client, sent_to=federation.nodes[client], transport=federation.transport, start=received
                )
                cosines = check_update(
                    update,
                    sent=start.sent,
                    gathered=federation.gathered,
                    needs=self._needs,
                    plan=(self.number, federation.code),
                    max_examples=federation.limits.max_examples,
                )
            except BadUpdate as reason:
                self._drop(client, str(reason))
                continue
            bytes_up = content_bytes(reply.content)
            del reply
            yield _Usable(update, cosines, bytes_up)
            del update

    def _plausible(self, usable: Sequence[_Usable], *, factor: float) -> Iterator[_Usable]:
        found = implausible({one.update.partition_id: one.cosines.moved for one in usable}, factor=factor)
        for client, reason in found.items():
            self._drop(client, reason)
        return (one for one in usable if one.update.partition_id not in found)

    def _fold(self, one: _Usable, observe: Observe | None) -> None:
        update, client = one.update, one.update.partition_id
        for name in self._into[client]:
            aggregation = self._aggregations[name]
            aggregation.rule.add(update, one.cosines)
            aggregation.received[client] = self._received[client]
            aggregation.gathered.append(update.gathered)
        if observe is not None:
            observe(client, {**self._starts[self._start_of[client]].frozen, **update.layers})
        self._report.clients.append(self._row(one))

    def _row(self, one: _Usable) -> ClientRow:
        update, cosines = one.update, one.cosines
        return ClientRow(
            round=self.number,
            client=update.partition_id,
            model=self._start_of[update.partition_id],
            loss=_finite(update.train_loss),  # NaN without a local epoch
            seconds=_finite(update.seconds),
            bytes_up=one.bytes_up,
            bytes_down=self._bytes_down[update.partition_id],
            examples=update.num_examples,
            cosine=cosines.weights,
            model_cosine=cosines.model if cosines.weights else None,
            layer_cosine=cosines.mean,
        )

    def _drop(self, client: int, reason: str) -> None:
        self._report.dropped[client] = reason
        log.warning("client %d dropped: %s", client, reason)

    def _nothing_usable(self) -> str:
        clients: dict[str, list[str]] = {}
        for client, reason in self._report.dropped.items():
            clients.setdefault(reason, []).append(str(client))
        reasons = "; ".join(f"client {', '.join(ids)}: {reason}" for reason, ids in clients.items())
        return f"round {self.number}: none of {len(self._start_of)} clients sent a usable update ({reasons})"

    # --- the new state ---

    def _aggregate(self, name: str) -> Model:
        """The model after the round."""
        federation, start, one = self._federation, self._starts[name], self._aggregations[name]
        model = start.model
        moments, new = federation.server_optimizer.step(
            model.moments, model.updates + 1, start.sent.layers, one.rule.finish()
        )
        trained = {**start.trained, **new}
        memory, findings = federation.strategy.server.remember(
            model, self.number, trained, rule=one.rule, received=one.received
        )
        self._report.findings.update({f"{key}{suffix(name)}": value for key, value in findings.items()})
        shared = federation.method.gather(one.gathered, model.shared)
        model = replace(
            model,
            layers={**model.layers, **trained},
            shared=shared,
            memory=memory,
            moments=moments,
            updates=model.updates + 1,
        )
        return federation.calibrated(model, self.number, at="end")


def _finite(value: float | None) -> float | None:
    """None for what JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
