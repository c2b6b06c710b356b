"""Server optimisers: by hand, against Flower's strategies of the same names, and what they leave alone."""

from functools import partial
from math import sqrt
from types import SimpleNamespace

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedssl.arrays import is_weight
from fedssl.wire.records import arrays_to_record, record_to_arrays
from simulation.grid import LocalGrid
from strategies.mods.server_optimizer import FedAdagrad, FedAdam, FedAvgM, FedYogi
from tests.arrays import same

every_optimizer = pytest.mark.parametrize("kind", [FedAvgM, FedAdagrad, FedAdam, FedYogi])


def model(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {
        "conv.weight": random.standard_normal((8, 3, 3, 3)).astype(dtype),
        "bn.running_mean": random.standard_normal(8).astype(dtype),
        "bn.running_var": random.uniform(0.5, 1.5, 8).astype(dtype),
        "bn.num_batches_tracked": np.array(10 * seed + 3),
        "fc.bias": np.zeros(5, dtype),
        "temperature": np.array(random.uniform(0.1, 1), dtype),
    }


def moves(optimizer, old, deltas):
    """A scalar after each round, where clients agree on what it was before plus one of ``deltas``."""
    values, moments = [], {}
    for round, delta in enumerate(deltas, start=1):
        array = np.array([old])
        moments, new = optimizer.step(moments, round, {"a": array}, {"a": array + delta})
        old = float(new["a"][0])
        values.append(old)
    return values


def test_fedavgm_by_hand():
    # v = 0.5 v - delta, x = x - 0.5 v, from x = 1:
    #   delta -0.4: v = 0.4, x = 0.8    delta -0.2: v = 0.4, x = 0.6    delta 1: v = -0.8, x = 1.0
    values = moves(FedAvgM(lr=0.5, momentum=0.5), 1.0, [-0.4, -0.2, 1.0])
    assert values == pytest.approx([0.8, 0.6, 1.0], rel=1e-12)


def test_fedadam_by_hand():
    # m = (m + delta) / 2, v = (3 v + delta^2) / 4, x = x + 0.3 c m / (sqrt(v) + 0.5), from x = 1:
    #   round 1, delta 2: m = 1, v = 1, c = sqrt(1 - (3/4)^2) / (1 - 1/4) = sqrt(7) / 3
    #   round 2, delta 3: m = 2, v = 3, c = sqrt(1 - (3/4)^3) / (1 - 1/8) = sqrt(37) / 7
    first = 1 + 0.3 * sqrt(7) / 3 / 1.5
    second = first + 0.6 * sqrt(37) / 7 / (sqrt(3) + 0.5)
    values = moves(FedAdam(lr=0.3, beta_1=0.5, beta_2=0.75, tau=0.5), 1.0, [2.0, 3.0])
    assert values == pytest.approx([first, second], rel=1e-12)


def test_fedadagrad_by_hand():
    # v = v + delta^2, x = x + 0.3 delta / (sqrt(v) + 0.5), from x = 1: deltas 3 and 4 give v = 9 and 25.
    values = moves(FedAdagrad(lr=0.3, tau=0.5), 1.0, [3.0, 4.0])
    assert values == pytest.approx([1 + 0.9 / 3.5, 1 + 0.9 / 3.5 + 1.2 / 5.5], rel=1e-12)


def test_fedyogi_by_hand():
    # m = (m + delta) / 2, v = v - delta^2 sign(v - delta^2) / 4, x = x + 0.3 m / (sqrt(v) + 0.5), from x = 1:
    #   delta 2:   m = 1,     v = 0 + 4/4
    #   delta 0.5: m = 0.75,  v = 1 - 0.25/4 = 0.9375
    #   delta 3:   m = 1.875, v = 0.9375 + 9/4 = 3.1875
    first = 1 + 0.3 / 1.5
    second = first + 0.225 / (sqrt(0.9375) + 0.5)
    third = second + 0.5625 / (sqrt(3.1875) + 0.5)
    values = moves(FedYogi(lr=0.3, beta_1=0.5, beta_2=0.75, tau=0.5), 1.0, [2.0, 0.5, 3.0])
    assert values == pytest.approx([first, second, third], rel=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FedAvgM(), flower.FedAvgM(server_momentum=0.9)),
        (FedAvgM(lr=0.3, momentum=0.5), flower.FedAvgM(server_learning_rate=0.3, server_momentum=0.5)),
        (FedAvgM(lr=0.3, momentum=0.0), flower.FedAvgM(server_learning_rate=0.3, server_momentum=0.0)),
        (FedAdam(), flower.FedAdam()),
        (FedAdam(lr=0.2, beta_1=0.6, beta_2=0.8, tau=0.1), flower.FedAdam(eta=0.2, beta_1=0.6, beta_2=0.8, tau=0.1)),
        (FedAdagrad(), flower.FedAdagrad(eta=0.1, tau=1e-3)),
        (FedYogi(), flower.FedYogi()),
        (FedYogi(lr=0.2, beta_1=0.6, beta_2=0.8, tau=0.1), flower.FedYogi(eta=0.2, beta_1=0.6, beta_2=0.8, tau=0.1)),
    ],
)
def test_weights_equal_those_of_flowers_strategies(ours, theirs):
    grid = LocalGrid(ClientApp(), num_clients=2)
    moments = {}
    mine = flowers = {name: array for name, array in model(0).items() if is_weight(name, array)}
    for round in range(1, 4):
        theirs.configure_train(round, arrays_to_record(flowers), ConfigRecord(), grid)
        steps = model(round)
        # Both see the same client: its model is what it received, plus a step.
        client = {name: np.asarray(array + np.float32(0.1) * steps[name]) for name, array in mine.items()}
        content = RecordDict({"arrays": arrays_to_record(client), "metrics": MetricRecord({"num-examples": 7})})
        arrays, _ = theirs.aggregate_train(round, [Message(content, 1, "train")])
        flowers = record_to_arrays(arrays)
        moments, mine = ours.step(moments, round, mine, client)
        for name, array in mine.items():
            np.testing.assert_allclose(array, flowers[name], rtol=1e-6, atol=1e-6, err_msg=name)
            assert array.dtype == np.float32
    assert not same(mine, client)  # something has happened beside averaging


@every_optimizer
def test_statistics_and_counters_are_what_the_rule_made_them(kind):
    optimizer, moments, old = kind(), {}, model(0)
    for round in (1, 2, 3):
        aggregated = model(round)
        moments, new = optimizer.step(moments, round, old, aggregated)
        for name, array in aggregated.items():
            assert is_weight(name, array) or new[name] is array
        old = new
    assert set(next(iter(moments.values()))) == {"conv.weight", "fc.bias", "temperature"}


@every_optimizer
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_names_shapes_dtypes_and_inputs_survive(kind, dtype):
    optimizer, moments, old = kind(), {}, model(0, dtype)
    for round in (1, 2):
        aggregated = model(round, dtype)
        inputs = (old, aggregated, *moments.values())
        before = [{name: array.copy() for name, array in layers.items()} for layers in inputs]
        for layers in inputs:
            for array in layers.values():
                array.flags.writeable = False
        moments, new = optimizer.step(moments, round, old, aggregated)
        assert all(same(layers, copy) for layers, copy in zip(inputs, before, strict=True))
        assert list(new) == list(old)
        for name, array in new.items():
            assert type(array) is np.ndarray
            assert (array.shape, array.dtype) == (old[name].shape, old[name].dtype), name
            assert np.isfinite(array).all()
        old = new


def test_neutral_settings_assign_the_aggregate():
    old, aggregated = model(0), model(1)
    for name, array in FedAvgM(lr=1.0, momentum=0.0).step({}, 1, old, aggregated)[1].items():
        np.testing.assert_allclose(array, aggregated[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [FedAvgM, partial(FedAdagrad, beta_1=0.5), FedAdam, FedYogi])
def test_layers_that_are_absent_in_a_round_keep_their_moments(kind):
    # As with EUC, where a layer may be averaged in every second round only.
    old, step = model(0), kind().step
    moments, first = step({}, 1, old, model(1))
    part = {name: array for name, array in first.items() if not name.startswith("conv")}
    moments, rest = step(moments, 2, part, {name: array for name, array in model(2).items() if name in part})
    assert set(rest) == set(part)
    moved = step(moments, 3, first, first)[1]["conv.weight"] - first["conv.weight"]
    assert np.abs(moved).max() > 0  # by the momentum of round 1 alone


def test_the_first_update_of_a_model_is_step_one():
    old, aggregated = model(0), model(1)
    start = SimpleNamespace(model=SimpleNamespace(num_updates=0), expected_upload=SimpleNamespace(layers=old))
    new, _ = FedAdam().finish(aggregated, start, {}, used=1, round=9)
    assert same(new, FedAdam().step({}, 1, old, aggregated)[1])
    assert not same(new, FedAdam().step({}, 2, old, aggregated)[1])
