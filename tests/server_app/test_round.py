"""What every strategy does with replies: order, bad updates, failed and silent clients, what travels."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedssl.errors import InputError, RunFailed
from fedssl.messages import ClientUpdate, TrainPlan, from_record, to_record
from server_app.app import receive
from simulation.local_grid import LocalGrid
from strategies.base import sample_clients
from strategies.fedavg import FedAvg
from strategies.l_dawa import LDAWA
from strategies.m_dawa import MDAWA

LAYERS = {
    "encoder.weight": np.array([1.0, 2.0, 2.0], dtype=np.float32),
    "encoder.bn.running_mean": np.array([0.5], dtype=np.float32),
}


def good(layers, partition):
    return {name: array + partition for name, array in layers.items()}


def missing_array(layers, partition):
    return {"encoder.weight": layers["encoder.weight"]}


def wrong_shape(layers, partition):
    return {**layers, "encoder.weight": np.zeros(4, dtype=np.float32)}


def not_finite(layers, partition):
    return {**layers, "encoder.weight": np.array([1.0, np.nan, 2.0], dtype=np.float32)}


def not_finite_buffer(layers, partition):
    return {**layers, "encoder.bn.running_mean": np.array([np.inf], dtype=np.float32)}


def extra_array(layers, partition):
    return {**layers, "spy.weight": np.zeros(1, dtype=np.float32)}


def integers(layers, partition):
    return {**layers, "encoder.weight": np.zeros(3, dtype=np.int64)}


def crash(layers, partition):
    raise ValueError("no camera")


def federation(behaviours, received=None):
    """A grid whose client k does ``behaviours[k]``, reporting every metric it is asked for."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        plan = TrainPlan.from_content(message.content)
        partition = context.node_config["partition-id"]
        layers = behaviours[partition](plan.layers, partition)
        update = ClientUpdate(
            layers=layers, partition_id=partition, num_examples=10 + partition, train_loss=1.0, seconds=0.5
        )
        content = update.to_content(plan.metrics)
        if received is not None:
            received.append(content)
        return Message(content, reply_to=message)

    return LocalGrid(app, num_clients=len(behaviours))


def configure(strategy, grid, *, clients_per_round=None):
    nodes = list(grid.get_node_ids())
    values = {"seed": 0, "clients-per-round": clients_per_round or len(nodes), "nodes": nodes}
    config = ConfigRecord({**values, "settings": "{}", "keep-from": 0, "lr-factor": 1.0, "code": "x"})
    return strategy.configure_train(1, to_record(LAYERS), config, grid)


def run_round(strategy, behaviours, *, reverse=False, received=None):
    grid = federation(behaviours, received)
    replies = list(receive(grid, configure(strategy, grid), timeout=60))
    arrays, _ = strategy.aggregate_train(1, reversed(replies) if reverse else replies)
    return from_record(arrays)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (missing_array, "layer encoder.bn.running_mean is missing"),
        (wrong_shape, r"layer encoder.weight has shape \(4,\) instead of \(3,\)"),
        (not_finite, "layer encoder.weight has values that are not finite"),
        (not_finite_buffer, "layer encoder.bn.running_mean has values that are not finite"),
        (extra_array, "layer spy.weight is not part of the global model"),
        (integers, "layer encoder.weight has dtype int64"),
        (crash, "it failed with ValueError: no camera"),
    ],
)
@pytest.mark.parametrize("strategy", [FedAvg, LDAWA, MDAWA])
def test_a_bad_update_is_dropped_and_the_round_goes_on(strategy, bad, reason):
    tested, reference = strategy(), strategy()
    result = run_round(tested, [good, bad, good])
    assert list(tested.report.dropped) == [1]
    assert pytest.raises(AssertionError, match=reason).matches(AssertionError(tested.report.dropped[1]))
    assert [row.client for row in tested.report.clients] == [0, 2]

    # The same as if the bad client had not been there: clients 0 and 2 alone, aggregated by the same rule.
    grid = federation([good, good, good])
    replies = list(receive(grid, configure(reference, grid), timeout=60))
    expected, _ = reference.aggregate_train(1, [replies[0], replies[2]])
    for name, array in from_record(expected).items():
        assert np.array_equal(result[name], array)
    assert reference.report.dropped == {1: "no reply in time"}


def test_a_round_without_any_usable_update_fails_with_the_reasons():
    with pytest.raises(RunFailed, match=r"none of 2 clients .*client 0: it failed with .*no camera.*client 1: layer"):
        run_round(FedAvg(), [crash, not_finite])


def test_a_round_without_any_reply_fails():
    strategy = FedAvg()
    configure(strategy, federation([good, good]))
    with pytest.raises(RunFailed, match="client 0, 1: no reply in time"):
        strategy.aggregate_train(1, [])


def test_a_missing_metric_drops_the_update():
    strategy = FedAvg()
    grid = federation([good, good])
    replies = list(receive(grid, configure(strategy, grid), timeout=60))
    del replies[0].content["metrics"]["num-examples"]
    strategy.aggregate_train(1, replies)
    assert strategy.report.dropped == {0: "metric num-examples is missing"}


@pytest.mark.parametrize("strategy", [FedAvg, LDAWA, MDAWA])
def test_the_order_of_arrival_changes_nothing(strategy):
    rng = np.random.default_rng(0)

    def noisy(layers, partition):
        return {name: (array + rng.normal(size=array.shape)).astype(np.float32) for name, array in layers.items()}

    grid = federation([noisy] * 5)
    tested = strategy()
    replies = list(receive(grid, configure(tested, grid), timeout=60))
    one, _ = tested.aggregate_train(1, replies)
    other, _ = tested.aggregate_train(1, [replies[k] for k in (3, 0, 4, 2, 1)])
    for name, array in from_record(one).items():
        assert np.array_equal(from_record(other)[name], array)
    assert [row.client for row in tested.report.clients] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("strategy", "declared"),
    [
        (FedAvg(), {"num-examples"}),
        (FedAvg(weighting="uniform"), set()),
        (LDAWA(), set()),
        (LDAWA(weighting="examples"), {"num-examples"}),
        (LDAWA(weighting="loss"), {"train-loss"}),
        (LDAWA(warmup_rounds=1), {"num-examples"}),
        (LDAWA(metrics=["seconds"]), {"seconds"}),
        (MDAWA(), set()),
    ],
)
def test_only_what_the_strategy_declares_travels_up(strategy, declared):
    received = []
    run_round(strategy, [good, good], received=received)
    for content in received:
        assert set(content["metrics"]) == declared
        assert set(content["arrays"]) == set(LAYERS)
        assert set(content) == {"arrays", "metrics"}


def test_rows_of_a_round():
    strategy = LDAWA()
    run_round(strategy, [good, good])
    first, second = strategy.report.clients
    # Client 0 sent the global layers back. Client 1 sent (2, 3, 3): cosine (1*2 + 2*3 + 2*3) / (3 * sqrt(22)).
    assert first.cosine == {"encoder.weight": pytest.approx(1.0)}
    assert second.cosine == {"encoder.weight": pytest.approx(14 / (3 * np.sqrt(22)))}
    assert (first.loss, first.examples, first.bytes_up) == (None, None, 16)
    assert first.bytes_down > 16


def test_unknown_metrics_are_refused():
    with pytest.raises(InputError, match="strategy.metrics has loss; allowed are num-examples, train-loss, seconds"):
        FedAvg(metrics=["loss"])


def test_clients_are_drawn_by_seed_and_round_alone():
    draw = [sample_clients(3, round, num_clients=20, clients_per_round=5) for round in range(1, 200)]
    assert draw == [sample_clients(3, round, num_clients=20, clients_per_round=5) for round in range(1, 200)]
    assert all(len(set(clients)) == 5 and clients == sorted(clients) for clients in draw)
    assert draw[0] != draw[1] or draw[1] != draw[2]
    assert draw != [sample_clients(4, round, num_clients=20, clients_per_round=5) for round in range(1, 200)]
    # Each of the 20 clients is expected in 199 * 5 / 20 = 50 rounds, with a standard deviation of 6.
    counts = np.bincount(np.concatenate(draw), minlength=20)
    assert counts.min() > 50 - 5 * 6
    assert counts.max() < 50 + 5 * 6


def test_messages_go_to_the_nodes_of_the_chosen_partitions():
    strategy = FedAvg()
    grid = federation([good] * 6)
    messages = list(configure(strategy, grid, clients_per_round=2))
    nodes = list(grid.get_node_ids())
    chosen = sample_clients(0, 1, num_clients=6, clients_per_round=2)
    assert [message.metadata.dst_node_id for message in messages] == [nodes[k] for k in chosen]


def test_a_reply_that_is_no_update_is_dropped():
    strategy = FedAvg()
    grid = federation([good, good])
    replies = list(receive(grid, configure(strategy, grid), timeout=60))
    replies[1].content = RecordDict({"arrays": ArrayRecord()})
    strategy.aggregate_train(1, replies)
    assert strategy.report.dropped == {1: "record 'metrics' is missing"}


@pytest.mark.parametrize("value", [[1, 2], float("nan"), 0, -3])
def test_a_metric_that_is_no_count_drops_the_update(value):
    strategy = FedAvg()
    grid = federation([good, good])
    replies = list(receive(grid, configure(strategy, grid), timeout=60))
    replies[0].content["metrics"]["num-examples"] = value
    strategy.aggregate_train(1, replies)
    assert list(strategy.report.dropped) == [0]


def test_what_json_cannot_hold_is_null_in_the_row():
    strategy = FedAvg(metrics=["train-loss"])
    grid = federation([good])
    replies = list(receive(grid, configure(strategy, grid), timeout=60))
    replies[0].content["metrics"]["train-loss"] = float("nan")
    strategy.aggregate_train(1, replies)
    assert strategy.report.clients[0].loss is None


def test_an_error_that_flower_makes_itself_drops_the_client_it_is_about():
    strategy = FedAvg()
    grid = federation([good, good, good])
    sent = list(configure(strategy, grid))
    replies = list(receive(grid, sent, timeout=60))
    # Such a reply, e.g. for a node that went offline, bears the server's id as its sender.
    offline = Message(Error(code=3, reason="node unavailable"), reply_to=sent[1])
    offline.metadata.__dict__["_src_node_id"] = 1
    strategy.aggregate_train(1, [replies[0], offline, replies[2], replies[2], offline])
    assert strategy.report.dropped == {1: "it failed with node unavailable"}
    assert [row.client for row in strategy.report.clients] == [0, 2]


def test_an_update_of_absurd_size_is_dropped():
    def absurd(layers, partition):
        return {**layers, "encoder.weight": np.full(3, 3e38, dtype=np.float32)}

    strategy = LDAWA()
    run_round(strategy, [good, absurd])
    assert list(strategy.report.dropped) == [1]


def test_another_dtype_is_dropped():
    def double(layers, partition):
        return {**layers, "encoder.weight": np.full(3, 1e100)}

    strategy = LDAWA()
    run_round(strategy, [good, double])
    assert strategy.report.dropped == {1: "layer encoder.weight has dtype float64 instead of float32"}
