"""Base class of the strategies for Flower apps: Flower's `FedAvg` with the server side of an algorithm of this package.

Updates are sorted by their bits before they are summed: the order of nodes and replies differs in every simulation of
Flower, but the result does not.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedssl.arrays import Cosines, GlobalLayers, Layers
from fedssl.errors import InputError
from fedssl.safe_io import sanitize_line
from strategies.aggregate import aggregate_valid
from strategies.base import ServerStrategy
from strategies.flower.arrays import as_parts, check_parts, digest, in_parts, public_name, read_layers, write_layers
from strategies.flower.replies import Reply, SetupError, read_reply
from strategies.flower.task import ClientTask
from strategies.types import AggregatedModel, GlobalModel

log = logging.getLogger("flwr")  # what Flower's commands show

MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]


class FedAvgOptions(TypedDict, total=False):
    """Arguments of Flower's `FedAvg`, which documents them."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsFunction | None
    evaluate_metrics_aggr_fn: MetricsFunction | None


class Options(FedAvgOptions, total=False):
    """Arguments of all strategies.

    ``local`` are prefixes of arrays that stay on the clients, which keep them themselves or by `client_mod`: they are
    not aggregated, and replies need not have them. ``statistics`` are names of arrays that are averaged like running
    statistics; those of torch are recognized by their names.
    """

    local: str | Sequence[str]
    statistics: Collection[str]


def order_of(reply: Reply) -> tuple[str, float, float]:
    """Return the key by which replies are sorted."""
    return digest(reply.update.layers), reply.update.num_examples or 0, reply.update.train_loss or 0


class FlowerRule(FedAvg):
    """Flower's `FedAvg` whose ``aggregate_train`` is that of a server side.

    Flower passes the arrays of a round to ``configure_train`` only, which stores them. Arguments are those of `Options`
    and of a subclass.
    """

    def __init__(
        self,
        server: ServerStrategy,
        *,
        task: ClientTask | None = None,
        needs_mod: bool = False,
        loss_key: str = "",
        local: str | Sequence[str] = (),
        statistics: Collection[str] = (),
        **options: Unpack[FedAvgOptions],
    ) -> None:
        super().__init__(**options)
        self.server, self.needs_mod, self.loss_key = server, needs_mod, loss_key
        self.task = replace(task or ClientTask(), local=as_parts(local), statistics=tuple(statistics))
        self._round = self._server_round = 0
        self._model = GlobalModel(layers={})
        self._returned: ArrayRecord | None = None  # of the last round, as Flower has it
        self._expected: GlobalLayers | None = None  # the layers to aggregate in this round
        self._changed: dict[str, int] = {}  # round of the last change of each layer
        self._last: dict[int, int] = {}  # last round of nodes that kept what they did not upload
        self._downloaded: dict[int, tuple[str, ...]] = {}  # by node of this round

    @property
    def required_metrics(self) -> Collection[str]:
        """Names of the metrics that replies need in this round."""
        return self.server.aggregator(self._round).required_metrics

    def begin_round(self, layers: Layers, round: int, config: ConfigRecord) -> tuple[Layers, list[str]]:
        """Return the layers that a round starts from, and the names of those that clients train."""
        return layers, [name for name in layers if not in_parts(name, self.task.local)]

    def task_in(self, round: int) -> ClientTask:
        """Return the task of the clients in a round."""
        return self.task

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages with the arrays, or those of them that a client has not kept."""
        if self.fraction_train == 0.0:
            return super().configure_train(server_round, arrays, config, grid)
        # A second `start` begins with round 1 again, but clients have kept their state.
        self._round += max(server_round - self._server_round, 1)
        self._server_round, round = server_round, self._round
        received = self._read_arrays(arrays)
        layers, trained = self.begin_round(received, round, config)
        is_known = arrays is self._returned
        self._changed |= {name: round for name in layers if not is_known or layers[name] is not received[name]}
        self._model = replace(self._model, layers=layers)
        some = self.server.upload_names(self._model, round, {name: layers[name] for name in trained})
        due = tuple(trained) if some is None else some
        self._trained, self._expected = trained, GlobalLayers({name: layers[name] for name in due})
        upload = None if len(due) == len(layers) else due
        replace(self.task_in(round), num_arrays=len(layers), upload=upload).write(config)
        record = arrays if layers is received else write_layers(layers)
        messages = list(super().configure_train(server_round, record, config, grid))
        self._downloaded = {message.metadata.dst_node_id: self._shorten(message) for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new arrays and metrics; None, which keeps the arrays, if no reply can be used."""
        replies = list(replies)
        if not replies:
            return None, None
        if self._expected is None:
            raise InputError("aggregate_train needs the arrays of the round; call super().configure_train() before it")
        used, all_cosines = self._usable(replies, self._expected)
        if not used:
            log.error(
                "aggregate_train: no reply of round %d can be used, and the arrays stay as they are", server_round
            )
            return None, None
        self._last |= {reply.node: self._round for reply in used if reply.has_mod}
        aggregator = self.server.aggregator(self._round)
        updates = [replace(reply.update, partition_id=number) for number, reply in enumerate(used)]
        new = aggregate_valid(self._expected, updates, all_cosines, aggregator)
        layers = {**self._model.layers, **new}
        done = AggregatedModel(
            model=self._model,
            round=self._round,
            layers={name: layers[name] for name in self._trained},
            aggregator=aggregator,
            received={number: self._downloaded.get(reply.node, ()) for number, reply in enumerate(used)},
            num_clients=len(used),
        )
        state, measured = self.server.after_aggregation(done)
        self._model = replace(self._model, layers=layers, strategy_state=state)
        self._changed |= dict.fromkeys(new, self._round)
        self._returned = write_layers(layers)
        metrics = self._aggregate_metrics([reply.content for reply in used])
        for name, value in measured.items():
            if isinstance(value, int | float):
                metrics[name.replace("_", "-")] = value
        return self._returned, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of `FedAvg`, in which `client_mod` replaces ``local`` arrays by the client's own."""
        if self.task.local:
            ClientTask(local=self.task.local, statistics=self.task.statistics).write(config)
        return super().configure_evaluate(server_round, arrays, config, grid)

    def _read_arrays(self, arrays: ArrayRecord) -> Layers:
        """Return the layers of a round. New names are those that arguments must match."""
        layers, task = read_layers(arrays, self.task.statistics), self.task
        if not layers:
            raise InputError("initial_arrays has no arrays; pass ArrayRecord(model.state_dict())")
        if layers.keys() != self._model.layers.keys():
            parts = {"local": task.local, "statistics": task.statistics}
            check_parts(arrays, **parts, encoder=task.encoder, predictor=task.predictor)
            if all(name.isdigit() for name in arrays) and not task.statistics:
                log.info("arrays are numbered: running statistics among them are weights unless statistics= lists them")
        return layers

    def _shorten(self, message: Message) -> tuple[str, ...]:
        """Remove the arrays that a node has kept, and return the names of the others."""
        names = tuple(self._model.layers)
        last = self._last.pop(message.metadata.dst_node_id, None)  # until it has replied
        if last is not None:
            names = tuple(name for name in names if self._changed[name] >= last)
        if len(names) < len(self._model.layers):
            record = message.content.array_records[self.arrayrecord_key]
            wanted = ArrayRecord({public_name(name): record[public_name(name)] for name in names})
            message.content = RecordDict({**message.content, self.arrayrecord_key: wanted})
        return names

    def _usable(self, replies: Sequence[Message], expected: GlobalLayers) -> tuple[list[Reply], list[Cosines]]:
        """Return the replies that can be used, in an order that depends on nothing else, and log why others cannot."""
        problems: dict[int, InputError] = {}
        read: list[Reply] = []
        for message in replies:
            try:
                read.append(read_reply(message, rule=self, names=self._model.layers.keys(), expected=expected))
            except InputError as problem:
                problems[message.metadata.src_node_id] = problem
        read.sort(key=order_of)
        all_cosines = expected.cosines_of_all([reply.update.layers for reply in read])
        for reply, cosines in zip(read, all_cosines, strict=True):
            if not cosines.finite:
                problems[reply.node] = InputError(
                    f"layer {cosines.first_invalid} has NaN, infinite or too large values"
                )
        log.info("aggregate_train: %d of %d replies can be used", len(replies) - len(problems), len(replies))
        for node, reason in problems.items():
            log.warning("\t> reply of node %d is not used: %s", node, sanitize_line(str(reason), max_chars=500))
        setup = [reason for reason in problems.values() if isinstance(reason, SetupError)]
        if setup and len(setup) == sum(not message.has_error() for message in replies):
            raise setup[0]
        pairs = [pair for pair in zip(read, all_cosines, strict=True) if pair[0].node not in problems]
        return [reply for reply, _ in pairs], [cosines for _, cosines in pairs]

    def _aggregate_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Return the metrics of Flower's function, if all replies have the same ones and the weight."""
        records = [list(content.metric_records.values()) for content in contents]
        forms = {_form(record[0]) if len(record) == 1 else frozenset() for record in records}
        if len(forms) == 1 and (self.weighted_by_key, None) in forms.pop():
            return self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        log.warning(
            "metrics are not aggregated: each reply needs one MetricRecord with %s and the same metrics as all others",
            self.weighted_by_key,
        )
        return MetricRecord()


def _form(record: MetricRecord) -> frozenset[tuple[str, int | None]]:
    """Return the names of metrics, with the lengths of those that are lists."""
    return frozenset((name, len(value) if isinstance(value, list) else None) for name, value in record.items())
