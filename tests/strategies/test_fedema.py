"""FedEMA: the mixture by hand and slowly, lambda and d over rounds, what is taken from where, whole runs."""

import numpy as np
import pytest

from fedssl.arrays import is_weight
from fedssl.errors import InputError
from fedssl.model_arrays import exchanged_names
from fedssl.rules import check_rules
from strategies.fedema import DISTANCE, LAMBDA, FedEMA, FedEMAClient, blend
from strategies.fedu import FedUClient
from tests.arrays import same, same_bits
from tests.contexts import run_context
from tests.federation import Federation
from tests.states import load_tensors
from tests.strategies.clients import UNIT, make_byol, make_plan, make_simclr, participate, some_layers


def is_statistic(name):
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


@pytest.mark.parametrize(
    ("mu", "weight", "statistic", "counter"),
    [
        (0.0, [2, 4], 5, 100),
        (0.25, [3, 6], 5, 100),  # 0.25 * 6 + 0.75 * 2 = 3, 0.25 * 12 + 0.75 * 4 = 6
        (0.5, [4, 8], 5, 100),
        (0.75, [5, 10], 1, 7),  # the client has the larger share: the predictor's statistics are its own
        (1.0, [6, 12], 1, 7),
    ],
)
def test_mixture_by_hand(mu, weight, statistic, counter):
    received = {
        "encoder.weight": np.array([2, 4], np.float32),
        "encoder.running_var": np.array([5], np.float32),
        "encoder.num_batches_tracked": np.array(100),
        "predictor.weight": np.array([2, 4], np.float32),
        "predictor.running_var": np.array([5], np.float32),
        "predictor.num_batches_tracked": np.array(100),
    }
    own = {
        "encoder.weight": np.array([6, 12], np.float32),
        "predictor.weight": np.array([6, 12], np.float32),
        "predictor.running_var": np.array([1], np.float32),
        "predictor.num_batches_tracked": np.array(7),
        "target_encoder.weight": np.array([9, 9], np.float32),
    }
    assert {name: array.tolist() for name, array in blend(received, own, mu=mu).items()} == {
        "encoder.weight": weight,
        "encoder.running_var": [5],
        "encoder.num_batches_tracked": 100,
        "predictor.weight": weight,
        "predictor.running_var": [statistic],
        "predictor.num_batches_tracked": counter,
        "target_encoder.weight": [9, 9],
    }


@pytest.mark.parametrize("mu", [0, 0.1, 0.4999, 0.7, 1])
def test_mixture_equals_the_equation_and_leaves_its_inputs_alone(mu):
    random = np.random.default_rng(0)
    shapes = {"a.weight": (50, 40), "a.bias": (7,), "temperature": ()}
    one, other = (
        {name: np.asarray(random.standard_normal(shape), np.float32) for name, shape in shapes.items()} for _ in "12"
    )
    copies = [{name: array.copy() for name, array in layers.items()} for layers in (one, other)]
    for layers in (one, other):
        for array in layers.values():
            array.flags.writeable = False
    result = blend(one, other, mu=mu)
    assert all(same(layers, copy) for layers, copy in zip((one, other), copies, strict=True))
    assert not any(np.shares_memory(result[name], layers[name]) for layers in (one, other) for name in shapes)
    for name in shapes:
        expected = mu * other[name].astype(float) + (1 - mu) * one[name].astype(float)
        np.testing.assert_allclose(result[name], expected, rtol=1e-6, atol=1e-6)
        assert (result[name].dtype, result[name].shape) == (np.float32, shapes[name])
    assert same(blend(one, one, mu=mu), one)


@pytest.mark.parametrize("make", [make_byol, make_simclr])
def test_lambda_is_set_once_and_mu_every_round(tmp_path, make):
    # With tau = 0.6 lambda is 0.6 / d_1 and mu = min(0.6 d / d_1, 1): after steps of 1/2, 1/8 and 1 that is 0.6, 0.15
    # and 1. Layers of different rounds are 10 apart, so a d from anywhere but the start of training would show.
    steps, shares = {1: 0.5, 2: 0.125, 3: 1.0, 4: 0.25}, {1: 0.0, 2: 0.6, 3: 0.15, 4: 1.0}
    previous = {}
    shared_method, shared_strategy = make(), FedEMA(tau=0.6)
    for round, step in steps.items():
        plan, mu = make_plan(round, some_layers(shared_method, round)), shares[round]
        participate(shared_method, shared_strategy, plan, tmp_path / "other", step=3 * step)
        began, ended, sent = participate(shared_method, shared_strategy, plan, tmp_path / "shared", step=step)
        assert same_bits(sent, {name: ended[name] for name in exchanged_names(shared_method)})
        # In a process of its own a client does the same as among others.
        assert same(began, participate(make(), FedEMA(tau=0.6), plan, tmp_path / "fresh", step=step)[0])
        state = load_tensors(tmp_path / "shared", before=round + 1)
        assert float(state[DISTANCE]) == pytest.approx(step * UNIT, rel=1e-4)
        assert float(state[LAMBDA]) == pytest.approx(0.6 / (0.5 * UNIT), rel=1e-5)
        for name, array in began.items():
            received = plan.layers[name.removeprefix("target_")]
            own = previous.get(name, received)
            if name.startswith("target_"):
                expected = own
            elif is_statistic(name):
                expected = own if name.startswith("predictor.") and mu > 0.5 else received
            else:
                expected = mu * own.astype(float) + (1 - mu) * received.astype(float)
            np.testing.assert_allclose(array, expected, rtol=1e-4, err_msg=f"round {round}: {name}")
        previous = ended


@pytest.mark.parametrize(
    ("at", "overrides"),
    [("start", ("strategy=fedema", "strategy.tau=1")), ("end", ("strategy=fedu", "strategy.update=target"))],
)
def test_frozen_stages_are_the_servers_calibrated_ones(tmp_path, monkeypatch, overrides, at):
    begun = []

    def watch(half):
        usual = half.load_start

        def load_start(self, method, plan, state):
            layers = usual(self, method, plan, state)
            loaded = {name: value.detach().clone().numpy() for name, value in method.named_tensors.items()}
            begun.append((plan, loaded, state))
            return layers

        monkeypatch.setattr(half, "load_start", load_start)

    watch(FedEMAClient)
    watch(FedUClient)
    staged = ["method=byol", "schedule=layer_wise", "rounds=8", "calibration=auxiliary", f"calibration.when={at}"]
    federation = Federation(tmp_path, *overrides, *staged, "num_clients=2", "batch_size=16")
    federation.run(8)
    assert len(begun) == 2 * 8
    first = "encoder.blocks.0.0.weight"
    for plan, loaded, state in begun:
        trained = [
            name for name in plan.upload_names if name.startswith("encoder.") and is_weight(name, plan.layers[name])
        ]
        frozen = set(plan.layers) - set(plan.upload_names)
        assert (first in frozen) == (plan.round > 2)
        for name in frozen:  # whatever the client trained there in an earlier phase or had received since
            np.testing.assert_array_equal(loaded[name], plan.layers[name], err_msg=f"round {plan.round}: {name}")
        assert state is None or plan.round <= 3 or first not in state
        # In the second round of a phase every client begins with weights of its own where it trains: tau = 1 or
        # update=target leave nothing of the received ones. Else the test would say nothing.
        if plan.round == 2:
            assert all(not np.array_equal(loaded[name], plan.layers[name]) for name in trained)
    # The server trains the first stage on after clients have frozen it: what they receive is never the same.
    received = {plan.layers[first].tobytes() for plan, *_ in begun}
    assert len(received) == 8


def test_a_method_without_trained_kernels_is_refused():
    method = make_simclr()
    method.encoder.requires_grad_(False)
    with pytest.raises(InputError, match="of which nothing is trained; set another strategy"):
        check_rules([FedEMA().problem], run_context(method, num_clients=10, clients_per_round=2))
