"""Replies that cannot be used: which are dropped, and what the log and the errors say."""

import logging
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from fedssl.errors import InputError
from simulation.grid import LocalGrid
from strategies.flower import EUC, LDAWA, MDAWA, FedU, LayerWise, LossWeighted
from tests.strategies.flower.apps import app_of, record, reply, run

START = {"a.weight": np.array([3.0, 4.0], np.float32), "b.weight": np.array([12.0, 0.0], np.float32)}
ONE = {name: array + np.float32(1) for name, array in START.items()}


def app_with(bad):
    """Client 0 replies with ``bad``, the other one with the arrays."""
    return app_of(lambda client, round, layers, config: bad if client == 0 else layers, mods=())


def failing(client, round, layers, config):
    raise RuntimeError("the disk is full")


BAD = {
    "missing": (reply({"a.weight": ONE["a.weight"]}), "layer b.weight is missing; name arrays that stay"),
    "unknown": (reply(ONE | {"c": np.zeros(1)}), "array c is not in the model"),
    "shape": (reply(ONE | {"b.weight": np.zeros(3, np.float32)}), "has shape (3,) instead of (2,)"),
    "NaN": (reply(ONE | {"b.weight": np.array([1, np.nan], np.float32)}), "layer b.weight has NaN"),
    "overflow": (reply(ONE | {"b.weight": np.array([1, 1e300])}), "layer b.weight has NaN"),
    "no arrays": (RecordDict({"metrics": MetricRecord({"num-examples": 1})}), "it has 0 ArrayRecords; reply with one"),
    "empty": (reply(ONE, **{"num-examples": 0}), "num-examples=0 is not between 0 and 9.0072e+15"),
    "countless": (reply(ONE, **{"num-examples": 1e308}), "num-examples=1e+308 is not between 0 and 9.0072e+15"),
    "text": (reply({n: np.array(["x", "y"]) for n in START}), "instead of numbers; use arrays of integers"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_dropped_and_logged_and_others_count(caplog, name):
    bad, reason = BAD[name]
    with caplog.at_level(logging.INFO, logger="flwr"):
        result, _ = run(MDAWA(), app_with(bad), START, rounds=2)
    assert all(np.allclose(result[layer], array) for layer, array in START.items())
    assert "1 of 2 replies can be used" in caplog.text
    assert re.search(f"reply of node 2 is not used: [^\n]*{re.escape(reason)}", caplog.text)


@pytest.mark.parametrize("loss", [[1.0, 2.0], [1.0] * 9])
def test_metrics_that_differ_from_those_of_others_are_left_out(caplog, loss):
    def train(client, round, layers, config):
        return reply(ONE, accuracy=0.5 if client else loss)

    with caplog.at_level(logging.INFO, logger="flwr"):
        result, outcome = run(MDAWA(), app_of(train), START)
    # The cosine of (3, 4, 12, 0) and (4, 5, 13, 1) is 188 / sqrt(169 * 211).
    np.testing.assert_allclose(result["b.weight"], np.array([13, 1]) * 188 / math.sqrt(169 * 211), rtol=1e-6)
    assert outcome.train_metrics_clientapp == {1: {}}
    assert "metrics are not aggregated: each reply needs one MetricRecord with num-examples and the same" in caplog.text


def test_the_arrays_stay_if_no_reply_can_be_used(caplog):
    result, outcome = run(LDAWA(), app_of(failing), START, rounds=2)
    assert result == {}
    assert outcome.train_metrics_clientapp == {}
    assert "no reply of round 2 can be used, and the arrays stay as they are" in caplog.text
    assert "error: RuntimeError: the disk is full" in caplog.text


@pytest.mark.parametrize(
    ("strategy", "train", "reason"),
    [
        (LossWeighted(loss_key="loss"), lambda *_: reply(ONE), "loss_key='loss', which is none of its metrics (num-ex"),
        (LossWeighted(), lambda *_: reply(ONE, train_loss=[1.0]), "loss_key='train_loss', which is a list"),
        (FedU(encoder="a", predictor="b"), lambda *_: ONE, r"needs ClientApp(mods=[client_mod])"),
        (EUC(), lambda *_: ONE, "EUC needs ClientApp"),
        (
            LDAWA(weighting="examples"),
            lambda *_: reply(ONE, **{"num-examples": None}),
            "weighted_by_key='num-examples'",
        ),
        (LDAWA(), lambda *_: {"a": ONE["a.weight"]}, "array a is not in the model"),
    ],
)
def test_what_every_round_would_repeat_ends_the_run(strategy, train, reason):
    with pytest.raises(InputError) as error:
        run(strategy, app_of(train, mods=()), START)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: FedU(encoder="x", predictor="b"),
            "encoder='x' matches none of the 2 arrays of the model (a.weight, b",
        ),
        (lambda: LayerWise(stages=["a", "c"], rounds=2), "stages='c' matches none of the 2 arrays"),
        (lambda: LayerWise(stages=["a"], rounds=2), "stages= has 1; give 2 or more"),
        (lambda: LDAWA(local="a.w"), "local='a.w' matches none"),
        (lambda: LDAWA(statistics=["bn"]), "statistics='bn' matches none"),
        (lambda: LDAWA(weighting="best"), "weighting=best must be"),
        (lambda: EUC(interval=0), "interval=0 must be"),
    ],
)
def test_arguments_that_fit_no_array_are_named(make, reason):
    with pytest.raises(InputError) as error:
        run(make(), app_of(lambda *_: ONE), START)
    assert reason in str(error.value)


def test_initial_arrays_without_numbers_are_refused():
    halves = record(START)
    halves["a.weight"].dtype = "bfloat16"
    for initial, reason in ((ArrayRecord(), "no arrays"), (halves, "array a.weight is bfloat16")):
        with pytest.raises(InputError, match=reason):
            LDAWA().start(LocalGrid(app_of(lambda *_: ONE), num_clients=2), initial)
    with pytest.raises(InputError, match=r"call super\(\)\.configure_train\(\)"):
        LDAWA().aggregate_train(1, [object()])


def test_other_floating_point_dtypes_and_record_keys_are_accepted():
    def train(client, round, layers, config):
        content = reply({name: array.astype(np.float64) + 1 for name, array in layers.items()})
        return RecordDict({"model": content["arrays"], "numbers": content["metrics"]})

    result, outcome = run(LossWeighted(), app_of(train), START, rounds=2)
    assert all(np.array_equal(result[name], array + 2) for name, array in START.items())
    assert {array.dtype.name for array in result.values()} == {"float32"}
    assert outcome.train_metrics_clientapp[2] == {"train_loss": 0.5}


def test_flowers_differential_privacy_wraps_a_strategy():
    # The change (1, 1, 1, 1) of each client has norm 2 and is clipped to 1: each number becomes 0.5 larger.
    inner = LossWeighted(min_train_nodes=2)
    wrapped = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1.0, 2)
    app = app_of(lambda client, round, layers, config: {n: a + np.float32(1) for n, a in layers.items()})
    result = wrapped.start(LocalGrid(app, num_clients=2), record(START), num_rounds=2)
    assert all(np.allclose(array.numpy(), START[name] + 1) for name, array in result.arrays.items())


@pytest.mark.heavy
def test_the_import_needs_neither_ray_nor_hydra_nor_our_apps():
    code = "import sys, strategies.flower; print([m for m in sys.modules if m.partition('.')[0] in "
    code += "('ray', 'hydra', 'client_app', 'server_app', 'simulation')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
