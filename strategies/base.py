"""What every aggregation algorithm shares: who trains, what travels, which replies count, and the streaming of sums.

A strategy is both halves of one algorithm. The server half is `rule` (a streaming sum, see `Rule`), `up`, `down` and
`after_aggregate`; the client half is `load_global`, `keep` and `send`. The hooks of Flower's own ``Strategy`` are
implemented with them, so the classes also run under Flower's ``Strategy.start``.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedssl.errors import InputError, RunFailed
from fedssl.layers import Alignment, GlobalLayers, Layers
from fedssl.messages import CLIENT_METRICS, ClientUpdate, TrainPlan, content_bytes, from_record, to_record
from fedssl.methods.base import SSLMethod
from fedssl.model_layers import copies, kept_names, start_from, take_layers, travelling_names
from fedssl.seeding import numpy_generator
from strategies.server_optimizer import Assign, ServerOptimizer
from strategies.staging import Staging

log = logging.getLogger("fedssl")

State = dict[str, torch.Tensor]


class Rule(Protocol):
    """A streaming aggregation of one round: `start`, `add` for each client in order of partition id, `finish`."""

    def start(self, global_layers: GlobalLayers) -> None: ...
    def add(self, update: ClientUpdate, alignment: Alignment) -> None: ...
    def finish(self) -> Layers: ...


@dataclass(frozen=True)
class ClientRow:
    """What the server knows of one client's part in a round; the fields are the keys of ``clients.jsonl``."""

    round: int
    client: int
    loss: float | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    examples: int | None
    cosine: dict[str, float]


@dataclass(frozen=True)
class Travels:
    """What an algorithm exchanges, in words for people.

    Attributes
    ----------
    down, up : str
        Layers that a client receives, and sends back.
    metrics : tuple of str
        What a client reports beside its layers; nothing else leaves it.
    stays : str
        What a client keeps between rounds.
    """

    down: str
    up: str
    metrics: tuple[str, ...]
    stays: str


@dataclass
class RoundReport:
    """Outcome of a round.

    Attributes
    ----------
    clients : list of ClientRow
        A row for each update that was used.
    dropped : dict of int to str
        The reason for each client whose update was not.
    findings : dict
        What the rule itself found out, ready for JSON.
    """

    round: int
    clients: list[ClientRow] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    findings: dict[str, Any] = field(default_factory=dict)


def sample_clients(seed: int, round: int, *, num_clients: int, clients_per_round: int) -> list[int]:
    """Partition ids that train in a round, ascending: a pure function of seed and round, whatever the node ids are."""
    chosen = numpy_generator(seed, "clients", round).choice(num_clients, size=clients_per_round, replace=False)
    return sorted(int(client) for client in chosen)


class FedSSLStrategy(Strategy):
    """Base of all strategies.

    Parameters
    ----------
    metrics : sequence of str
        Metrics that clients report for the log beside those that the rule needs (`needs`). Nothing else leaves them.
    """

    def __init__(self, *, metrics: Sequence[str] = ()) -> None:
        unknown = [name for name in metrics if name not in CLIENT_METRICS]
        if unknown:
            raise InputError(f"strategy.metrics has {', '.join(unknown)}; allowed are {', '.join(CLIENT_METRICS)}")
        self.extra_metrics = tuple(metrics)
        self.server_optimizer: ServerOptimizer = Assign()
        self.staging = Staging()
        self.observe: Callable[[int, Layers], None] | None = None  # sees client and layers of every update that is used
        self.report = RoundReport(round=0)

    # --- server half: what an algorithm defines ---

    def needs(self) -> tuple[str, ...]:
        """Metrics that the rule cannot do without."""
        return ()

    def rule(self, round: int) -> Rule:
        """A fresh streaming rule for one round."""
        raise NotImplementedError

    def up(self, round: int, layers: Layers) -> tuple[str, ...]:
        """Names of the global ``layers`` that clients send back in this round; empty: all.

        Here and in the next two, ``layers`` are those that are trained in the round.
        """
        return ()

    def down(self, round: int, layers: Layers, client: int) -> tuple[str, ...]:
        """Names of the global ``layers`` that this client receives in this round; empty: all."""
        return ()

    def after_aggregate(self, round: int, layers: Layers) -> Layers:
        """Last change to the new global ``layers``, before the server calibrates the model."""
        return layers

    def models(self, layers: Layers) -> dict[str, Layers]:
        """The models that are evaluated and exported, results being means over them; here the global ``layers``.

        A key is what the name of the model's file has behind "encoder".
        """
        return {"": layers}

    def own_layers(self, client: int, sent: Layers) -> Layers:
        """Those layers of a client's model that the server knows to be its own, once its update has been added."""
        return sent

    def check(self, method: SSLMethod, *, clients_per_round: int) -> None:
        """Refuse, by an `InputError`, a method or a number of clients that the algorithm cannot work with."""

    def travels(self, method: SSLMethod) -> Travels:
        """What is exchanged and what stays, in words."""
        parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in travelling_names(method)))
        return Travels(down=parts, up=parts, metrics=self.metrics(), stays=", ".join(method.kept) or "nothing")

    def state(self) -> dict[str, Any]:
        """What the server half keeps between rounds, for a checkpoint: tensors, numbers and dicts of them."""
        return {"server_optimizer": self.server_optimizer.state(), "staging": self.staging.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.server_optimizer.restore(state["server_optimizer"])
        self.staging.restore(state["staging"])

    # --- client half ---

    def load_global(self, method: SSLMethod, plan: TrainPlan, state: State | None) -> None:
        """Merge the global layers with what this client kept (None: it takes part for the first time)."""
        own = {} if state is None else {name: value.numpy() for name, value in state.items()}
        start_from(method, {**plan.layers, **own})

    def keep(self, method: SSLMethod, plan: TrainPlan) -> State:
        """What the client keeps until its next participation; called after training, before `send`."""
        return copies(method, kept_names(method))

    def send(self, method: SSLMethod, plan: TrainPlan) -> Layers:
        """The layers that the client sends back; they may be taken out of the model."""
        return take_layers(method, plan.up or travelling_names(method))

    # --- Flower's hooks ---

    def metrics(self) -> tuple[str, ...]:
        """All metrics that travel up."""
        return tuple(dict.fromkeys([*self.needs(), *self.extra_metrics]))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per chosen client.

        ``config`` carries ``seed``, ``clients-per-round``, ``nodes`` (node ids in the order of partition ids),
        ``settings``, ``keep-from``, ``lr-factor`` and ``code``.
        """
        nodes = list(config["nodes"])  # type: ignore[arg-type]  # Flower's values are a union
        chosen = sample_clients(
            int(config["seed"]),  # type: ignore[arg-type]  # Flower's values are a union
            server_round,
            num_clients=len(nodes),
            clients_per_round=int(config["clients-per-round"]),  # type: ignore[arg-type]  # Flower's values are a union
        )
        self._all = self.staging.begin(server_round, from_record(arrays))
        stage, trained, frozen = self.staging.divide(server_round, self._all)
        layers = {name: self._all[name] for name in trained}
        up = self.up(server_round, layers) or (trained if stage else ())
        plan = TrainPlan(
            round=server_round,
            layers={},
            settings=str(config["settings"]),
            metrics=self.metrics(),
            keep_from=int(config["keep-from"]),  # type: ignore[arg-type]  # Flower's values are a union
            lr_factor=float(config["lr-factor"]),  # type: ignore[arg-type]  # Flower's values are a union
            code=str(config["code"]),
            up=up,
            depth=stage.depth if stage else None,
            frozen=stage.frozen if stage else 0,
            hold=self.staging.hold,
            depth_dropout=stage.dropout if stage else 0.0,
            transfer=stage is not None and stage.transfer and stage.number > 1,
        )
        self._layers = layers
        self._frozen = {name: self._all[name] for name in frozen}
        self._global = GlobalLayers({name: layers[name] for name in up} if up else layers)
        self._clients = {int(nodes[client]): client for client in chosen}  # type: ignore[call-overload]  # Flower's values are a union
        contents: dict[tuple[str, ...], RecordDict] = {}  # clients that receive the same share a record
        self._bytes_down: dict[int, int] = {}
        self._sent = []
        for node, client in self._clients.items():
            down = self.staging.lacks(client, frozen) + (self.down(server_round, layers, client) or trained)
            part = {name: self._all[name] for name in down}
            if down not in contents:
                contents[down] = replace(plan, layers=part).to_content()
            self._bytes_down[client] = content_bytes(contents[down], part)
            self._sent.append(Message(contents[down], node, "train", group_id=str(server_round)))
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies in as they come, in order of partition ids; bad updates are dropped and reported.

        Raises
        ------
        RunFailed
            No update could be used.
        """
        self.report = RoundReport(round=server_round)
        rule = self.rule(server_round)
        rule.start(self._global)
        for client, reply in self._in_order(replies):
            self._fold(rule, server_round, client, reply)
            del reply
        if not self.report.clients:
            clients: dict[str, list[str]] = {}
            for client, reason in self.report.dropped.items():
                clients.setdefault(reason, []).append(str(client))
            reasons = "; ".join(f"client {', '.join(ids)}: {reason}" for reason, ids in clients.items())
            raise RunFailed(
                f"round {server_round}: none of {len(self._clients)} clients sent a usable update ({reasons})"
            )
        new = self.server_optimizer.step(server_round, self._global.layers, rule.finish())
        layers = {**self._all, **self.after_aggregate(server_round, {**self._layers, **new})}
        used = [row.client for row in self.report.clients]
        layers = self.staging.end(server_round, layers, used=used, dropped=self.report.dropped)
        return to_record(layers), MetricRecord({"clients": len(self.report.clients)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluation happens on the server."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Evaluation happens on the server."""
        return None

    def summary(self) -> None:
        """Log the rule and what clients report."""
        log.info("strategy %s, clients report: %s", type(self).__name__, ", ".join(self.metrics()) or "nothing")

    # --- replies ---

    def _in_order(self, replies: Iterable[Message]) -> Iterator[tuple[int, Message]]:
        """Replies in order of partition ids; early ones wait, absent ones are dropped at the end."""
        expected = sorted(self._clients.values())
        waiting: dict[int, Message] = {}
        asked: dict[str, int] = {}
        for reply in replies:
            if not asked:  # messages have an id once they are sent, i.e. after the first reply was asked for
                asked = {sent.metadata.message_id: self._clients[sent.metadata.dst_node_id] for sent in self._sent}
            # An error reply that Flower itself makes bears the server's node id, so only the message tells the client.
            client = asked.get(reply.metadata.reply_to_message_id, -1)
            if client not in expected or client in waiting:
                log.warning("a reply that nobody waits for is ignored")
            elif reply.has_error():
                expected.remove(client)
                self._drop(client, f"it failed with {reply.error.reason}")
            else:
                waiting[client] = reply
            del reply  # a streamed reply is a whole model: let it go before the next one is made
            while expected and expected[0] in waiting:
                client = expected.pop(0)
                yield client, waiting.pop(client)
        for client in expected:
            if client in waiting:
                yield client, waiting.pop(client)
            else:
                self._drop(client, "no reply in time")

    def _fold(self, rule: Rule, round: int, client: int, reply: Message) -> None:
        try:
            update, alignment = self._check(client, reply)
        except ValueError as problem:
            self._drop(client, str(problem))
            return
        rule.add(update, alignment)
        if self.observe is not None:
            self.observe(client, {**self._frozen, **self.own_layers(client, update.layers)})
        self.report.clients.append(self._row(round, update, alignment, content_bytes(reply.content, update.layers)))

    def _drop(self, client: int, reason: str) -> None:
        self.report.dropped[client] = reason
        log.warning("client %d dropped: %s", client, reason)

    def _check(self, client: int, reply: Message) -> tuple[ClientUpdate, Alignment]:
        """The update and its cosines, or a ValueError with the reason why it cannot be used."""
        try:
            update = ClientUpdate.from_content(reply.content, client)
        except KeyError as missing:
            raise ValueError(f"record {missing} is missing") from missing
        except Exception as error:  # whatever a peer may have put into a message
            raise ValueError(f"the update cannot be read ({type(error).__name__}: {error})") from error
        self._global.check(update.layers)
        for name, value in (("num-examples", update.num_examples), ("train-loss", update.train_loss)):
            if name in self.needs() and value is None:
                raise ValueError(f"metric {name} is missing")
        if update.num_examples is not None and update.num_examples <= 0:
            raise ValueError(f"num-examples={update.num_examples} is not positive")
        if "train-loss" in self.needs() and not math.isfinite(update.train_loss or 0.0):
            raise ValueError(f"train-loss={update.train_loss} is not finite")
        alignment = self._global.align(update.layers)
        if not alignment.finite:
            raise ValueError(f"layer {alignment.offender} has values that are not finite, or far too large")
        for name, array in update.layers.items():
            if name.endswith("running_var") and array.size and array.min() < 0:
                raise ValueError(f"layer {name} has a negative variance")
        return update, alignment

    def _row(self, round: int, update: ClientUpdate, alignment: Alignment, bytes_up: int) -> ClientRow:
        return ClientRow(
            round=round,
            client=update.partition_id,
            loss=_finite(update.train_loss),  # NaN without a local epoch
            seconds=_finite(update.seconds),
            bytes_up=bytes_up,
            bytes_down=self._bytes_down[update.partition_id],
            examples=update.num_examples,
            cosine=alignment.cosines,
        )


def _finite(value: float | None) -> float | None:
    """None for what JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
