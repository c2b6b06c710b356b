"""The in-process grid with Flower's strategies and with failing clients."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedssl.errors import InputError
from server_app.messaging import receive
from server_app.nodes import discover_clients
from simulation.grid import LocalGrid


def adding_app(*, fails=()):
    """A ClientApp that adds its partition id to the global array and counts its calls."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        partition = context.node_config["partition-id"]
        if partition in fails:
            raise ValueError("no camera")
        calls = int(context.state.metric_records.get("calls", {"n": 0})["n"]) + 1
        context.state["calls"] = MetricRecord({"n": calls})
        array = message.content.array_records["arrays"].to_numpy_ndarrays()[0]
        metrics = MetricRecord({"num-examples": 1, "calls": calls})
        content = RecordDict({"arrays": ArrayRecord([array + partition]), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.query("node_info")
    def who(message, context):
        record = MetricRecord({name: context.node_config[name] for name in ("partition-id", "num-partitions")})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    return app


def test_flowers_strategies_run_unchanged():
    grid = LocalGrid(adding_app(), num_clients=3)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    # Each round adds the mean of the partition ids 0, 1, 2, which is 1.
    assert result.arrays.to_numpy_ndarrays()[0] == pytest.approx([2.0, 2.0])
    # The state of a node survives from round to round.
    assert result.train_metrics_clientapp[2]["calls"] == 2


def train_messages(grid):
    record = RecordDict({"arrays": ArrayRecord([np.zeros(1)]), "config": ConfigRecord({})})
    return [Message(record, node, "train") for node in grid.get_node_ids()]


def test_a_failed_client_replies_with_the_reason():
    grid = LocalGrid(adding_app(fails={1}), num_clients=3)
    replies = list(receive(grid, train_messages(grid), timeout=60))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert replies[1].error.reason == "ValueError: no camera"


def test_a_client_runs_only_when_its_reply_is_pulled():
    grid = LocalGrid(adding_app(fails={1}), num_clients=3)
    replies = receive(grid, train_messages(grid), timeout=60)
    assert not next(replies).has_error()
    assert len(grid._queue) == 2


def test_too_few_nodes(monkeypatch):
    monkeypatch.setattr("server_app.nodes.DISCOVERY_GRACE_SECONDS", 0.1)

    class Asked(LocalGrid):
        partition_nodes = None  # the server has to ask

    grid = Asked(adding_app(), num_clients=2)
    message = "num_clients=10 but the federation has 2 SuperNodes; add .*num-supernodes=10"
    with pytest.raises(InputError, match=message):
        discover_clients(grid, 10, timeout=60)


def test_the_time_of_replies_is_independent_of_federation_size():
    grid = LocalGrid(adding_app(), num_clients=1000)
    ids = list(grid.push_messages(train_messages(grid)))
    for number in range(3):
        looked_at = iter(ids[number:])
        assert len(list(grid.pull_messages(looked_at))) == 1
        assert len(list(looked_at)) == len(ids) - number - 1
