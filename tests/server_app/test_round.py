"""What a round does with replies under every strategy: order, bad updates, failed and silent clients, what travels."""

import math

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedssl.errors import RunError
from fedssl.wire.device import code_fingerprint
from fedssl.wire.messages import ClientUpdate, TrainPlan
from server_app.messaging import receive
from server_app.round import Round
from simulation.grid import LocalGrid
from strategies.fedavg import FedAvg
from strategies.l_dawa import LDAWA
from strategies.m_dawa import MDAWA
from strategies.types import GLOBAL, ServerState
from tests.arrays import same
from tests.federation import finish
from tests.server_app.small import LAYERS, small_federation

REPLY_CONFIG = ConfigRecord({"round": 1, "code-fingerprint": "x"})


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


def absurd(layers, partition):
    return {**layers, "encoder.weight": np.full(3, 3e38, dtype=np.float32)}


def crash(layers, partition):
    raise ValueError("no camera")


def make_grid(behaviours, received=None):
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
        content = update.to_content(plan)
        if received is not None:
            received.append(content)
        return Message(content, reply_to=message)

    return LocalGrid(app, num_clients=len(behaviours))


def configure(strategy, grid, *, clients_per_round=None, metrics=(), **updates):
    """The first round, whose messages are not sent yet."""
    federation = small_federation(grid, strategy, clients_per_round=clients_per_round, metrics=metrics, **updates)
    return Round(federation, ServerState())


def end(configured, replies):
    """The new global layers and the report."""
    state, report = finish(configured, replies)
    return state.models[GLOBAL].layers, report


def run_round(strategy, behaviours, *, received=None, metrics=(), **updates):
    """The new global layers and the report of a round of clients that behave in these ways."""
    grid = make_grid(behaviours, received)
    configured = configure(strategy, grid, metrics=metrics, **updates)
    return end(configured, receive(grid, configured.messages, timeout=60))


def played(strategy, behaviours, *, metrics=()):
    """A round, and the replies of clients that behave in these ways, which it has not seen yet."""
    grid = make_grid(behaviours)
    configured = configure(strategy, grid, metrics=metrics)
    return configured, list(receive(grid, configured.messages, timeout=60))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (missing_array, "layer encoder.bn.running_mean is missing"),
        (wrong_shape, r"layer encoder.weight has shape \(4,\) instead of \(3,\)"),
        (not_finite, "layer encoder.weight has values that are not finite"),
        (not_finite_buffer, "layer encoder.bn.running_mean has values that are not finite"),
        (extra_array, "layer spy.weight is not part of the global model"),
        (integers, "layer encoder.weight has dtype int64"),
        (absurd, "layer encoder.weight has values that are not finite, or far too large"),
        (crash, "it failed: ValueError: no camera"),
    ],
)
@pytest.mark.parametrize("strategy", [FedAvg, LDAWA, MDAWA])
def test_a_bad_update_is_dropped_and_the_round_goes_on(strategy, bad, reason):
    result, report = run_round(strategy(), [good, bad, good])
    assert list(report.dropped) == [1]
    assert pytest.raises(AssertionError, match=reason).matches(AssertionError(report.dropped[1]))
    assert [row.client for row in report.clients] == [0, 2]

    # The same as if the bad client had not been there: clients 0 and 2 alone, aggregated by the same rule.
    configured, replies = played(strategy(), [good, good, good])
    expected, report = end(configured, [replies[0], replies[2]])
    assert same(result, expected)
    assert report.dropped == {1: "no reply in time"}


@pytest.mark.parametrize("is_dropped", [False, True])
def test_clients_are_summed_in_blocks_of_the_sampled_clients(is_dropped):
    # In float32 2^24 + 1 = 2^24 (a tie, rounded to even), but 2^24 + 2 is exact. The sum of the first five of seven
    # clients is 2^24, with or without the second; that of the last two is 2. One after the other they add nothing.
    def values(layers, partition):
        return {**layers, "encoder.weight": np.full(3, 1 if partition else 2**24, np.float32)}

    behaviours = [values, crash if is_dropped else values, *[values] * 5]
    result, report = run_round(FedAvg(weighting="uniform"), behaviours)
    assert len(report.clients) == 7 - is_dropped
    assert result["encoder.weight"].tolist() == [np.float32(2**24 + 2) / np.float32(7 - is_dropped)] * 3


def test_a_round_without_any_usable_update_fails_with_the_reasons():
    with pytest.raises(RunError, match=r"none of 2 clients .*client 0: it failed: .*no camera.*client 1: layer"):
        run_round(FedAvg(), [crash, not_finite])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("train-loss", 1.1e6, "train-loss=1100000.0 is not from -1e+06 to 1e+06"),
        ("train-loss", -1e300, "train-loss=-1e+300 is not from -1e+06 to 1e+06"),
        ("train-loss", math.nan, "train-loss=nan is not finite"),
        ("seconds", -1.0, "seconds=-1.0 is not from 0 to 1e+07"),
        ("num-examples", None, "metric num-examples is missing"),
        ("num-examples", [1, 2], "the update cannot be read"),
        ("num-examples", math.nan, "the update cannot be read"),
        ("num-examples", 0, "num-examples=0 is not positive"),
        ("num-examples", -3, "num-examples=-3 is not positive"),
    ],
)
def test_a_metric_that_cannot_be_drops_the_update(name, value, reason):
    strategy = FedAvg() if name == "num-examples" else LDAWA(weighting="loss")
    configured, replies = played(strategy, [good, good], metrics=["seconds"])
    if value is None:
        del replies[0].content["metrics"][name]
    else:
        replies[0].content["metrics"][name] = value
    _, report = end(configured, replies)
    assert list(report.dropped) == [0]
    assert report.dropped[0].startswith(reason)


@pytest.mark.parametrize("strategy", [FedAvg, LDAWA, MDAWA])
def test_the_order_of_arrival_changes_nothing(strategy):
    rng = np.random.default_rng(0)

    def noisy(layers, partition):
        return {name: (array + rng.normal(size=array.shape)).astype(np.float32) for name, array in layers.items()}

    sent = [noisy(LAYERS, partition) for partition in range(5)]
    behaviours = [lambda layers, partition: sent[partition]] * 5
    configured, replies = played(strategy(), behaviours)
    one, _ = end(configured, replies)
    configured, replies = played(strategy(), behaviours)
    other, report = end(configured, [replies[k] for k in (3, 0, 4, 2, 1)])
    assert same(other, one)
    assert [row.client for row in report.clients] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("strategy", "metrics", "declared"),
    [
        (FedAvg(), (), {"num-examples"}),
        (FedAvg(weighting="uniform"), (), set()),
        (LDAWA(), (), set()),
        (LDAWA(weighting="examples"), (), {"num-examples"}),
        (LDAWA(weighting="loss"), (), {"train-loss"}),
        (LDAWA(warmup_rounds=1), (), {"num-examples"}),
        (LDAWA(), ("seconds",), {"seconds"}),
        (LDAWA(weighting="loss"), ("seconds", "train-loss"), {"seconds", "train-loss"}),
        (MDAWA(), (), set()),
    ],
)
def test_only_what_is_declared_travels_up(strategy, metrics, declared):
    received = []
    run_round(strategy, [good, good], received=received, metrics=metrics)
    assert len(received) == 2
    for content in received:
        assert set(content["metrics"]) == declared
        assert set(content["arrays"]) == set(LAYERS)
        assert set(content) == {"arrays", "method-upload", "metrics", "reply-config"}
        assert not content["method-upload"]  # the method has no server side


def test_a_reply_that_is_no_update_is_dropped():
    for records, absent in (
        ({"arrays": ArrayRecord()}, "metrics"),
        ({"arrays": ArrayRecord(), "metrics": MetricRecord()}, "reply-config"),
        ({"arrays": ArrayRecord(), "metrics": MetricRecord(), "reply-config": REPLY_CONFIG}, "method-upload"),
        ({"metrics": MetricRecord(), "method-upload": ArrayRecord(), "reply-config": REPLY_CONFIG}, "arrays"),
    ):
        configured, replies = played(FedAvg(), [good, good])
        replies[1].content = RecordDict(records)
        _, report = end(configured, replies)
        assert report.dropped == {1: f"record '{absent}' is missing"}


def test_an_error_of_flower_drops_its_client():
    configured, replies = played(FedAvg(), [good, good, good])
    # Such a reply, e.g. for a node that went offline, bears the server's id as its sender.
    offline = Message(Error(code=3, reason="node unavailable"), reply_to=configured.messages[1])
    offline.metadata.__dict__["_src_node_id"] = 1
    _, report = end(configured, [replies[0], offline, replies[2], replies[2], offline])
    assert report.dropped == {1: "it failed: node unavailable"}
    assert [row.client for row in report.clients] == [0, 2]


def test_the_last_participation_of_a_dropped_client_is_forgotten():
    """What it stored in the round is unknown, so that its next download must be complete."""
    grid = make_grid([good, not_finite])
    before = ServerState(round=4, last_participation={0: (2, GLOBAL), 1: (3, GLOBAL), 7: (1, GLOBAL)})
    configured = Round(small_federation(grid, FedAvg()), before)
    state, _ = finish(configured, receive(grid, configured.messages, timeout=60))
    assert state.last_participation == {0: (5, GLOBAL), 7: (1, GLOBAL)}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (
            {"round": 4, "code-fingerprint": code_fingerprint(), "state-rounds": [0, 0]},
            "it answers round 4 instead of round 1",
        ),
        (
            {"round": 1, "code-fingerprint": "older", "state-rounds": [0, 0]},
            f"it answers code older instead of code {code_fingerprint()}",
        ),
    ],
)
def test_an_answer_to_another_plan_is_dropped(answers, reason):
    configured, replies = played(FedAvg(), [good, good])
    replies[1].content["reply-config"] = ConfigRecord(answers)
    _, report = end(configured, replies)
    assert report.dropped == {1: reason}


def test_what_a_client_says_reaches_no_terminal_as_a_command():
    def attack(layers, partition):
        raise ValueError("\x1b[2J\x1b]0;owned\x07" + "x" * 5_000_000)

    _, report = run_round(FedAvg(), [good, attack])
    assert report.dropped[1].startswith("it failed: ValueError:  [2J ]0;owned xxx")
    assert len(report.dropped[1]) == 500


def test_a_reply_to_what_another_node_was_sent_is_dropped():
    configured, replies = played(FedAvg(), [good, good])
    one, two = (reply.metadata.src_node_id for reply in replies)
    replies[1].metadata.__dict__["_src_node_id"] = one
    _, report = end(configured, replies)
    assert report.dropped == {1: f"node {one} replied to what was sent to node {two}"}
