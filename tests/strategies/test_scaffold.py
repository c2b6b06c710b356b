"""SCAFFOLD: control variates by hand and by a slow transcription, over messages of every dtype, and after a resume."""

import numpy as np
import pytest
import torch

from fedssl.arrays import GlobalLayers
from fedssl.errors import InputError
from fedssl.training import LocalSteps
from fedssl.wire.messages import STRATEGY_BROADCAST, STRATEGY_UPLOAD, ClientUpdate, TrainPlan
from server_app.validation import InvalidUpdate
from strategies.control_variates import for_clients
from strategies.scaffold import OWN, Scaffold, control_change
from strategies.types import AggregatedModel, GlobalModel
from tests.federation import Federation
from tests.server_app.small import update_validator
from tests.strategies.clients import own_arrays, start_of

SCAFFOLD = ["strategy=scaffold", "optimizer.momentum=0", "optimizer.weight_decay=0"]


def array(*values):
    return np.array(values, dtype=np.float32)


def test_the_change_of_a_control_variate_by_hand():
    # x = 1 and 2, y = 0 and 3, K = 4 steps of 0.5: (x - y) / 2 = 0.5 and -0.5, minus c = 0.25 and 1.
    change = control_change({"w": array(0.25, 1)}, {"w": array(1, 2)}, {"w": array(0, 3)}, scale=4 * 0.5)
    np.testing.assert_array_equal(change["w"], array(0.25, -1.5))
    np.testing.assert_array_equal(control_change({}, {"w": array(1)}, {"w": array(1)}, scale=0)["w"], array(0))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_norm_of_steps_is_the_way_of_torch(momentum, nesterov):
    nesterov = nesterov and momentum > 0
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, momentum=momentum, nesterov=nesterov)
    for _ in range(3):
        weight.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    # Without momentum: 3 steps. With 0.5 the velocities are 1, 1.5 and 1.75.
    norm = LocalSteps(number=3, lr=0.25, momentum=momentum, nesterov=nesterov).norm
    assert -0.25 * norm == weight.item()
    assert norm == pytest.approx({(0.0, False): 3, (0.5, False): 4.25}.get((momentum, nesterov), norm))


@pytest.mark.parametrize("method", ["simclr", "swav"])
def test_three_rounds_equal_a_slow_transcription(tmp_path, method):
    """Algorithm 1 in float64 on what the clients sent: c is the mean of all c_i, and c_i the mean gradient."""
    options = [f"method={method}", "clients_per_round=2", "local_epochs=2"]
    options += ["method.queue_size=8", "method.queue_start_round=2"] if method == "swav" else []
    federation = Federation(tmp_path, *SCAFFOLD, *options)
    names = federation.method.trainable
    c = dict.fromkeys(names, 0.0)
    c_i = [dict(c) for _ in range(3)]
    for round in (1, 2, 3):
        sent = len(federation.updates)
        federation.run(1)
        clients = [row.client for row in federation.report.clients]
        plans = [TrainPlan.from_content(plan) for plan in federation.plans[sent:]]
        updates = [ClientUpdate.from_content(update, 0) for update in federation.updates[sent:]]
        changes = []
        for client, plan, update in zip(clients, plans, updates, strict=True):
            for name in names:
                np.testing.assert_allclose(plan.strategy_arrays.get(name, 0), c[name], rtol=1e-5, atol=1e-6)
            # 20 images in batches of at most 64 are 1 step per epoch: K = 2, and the rate is 0.03.
            step = {name: start_of(plan, name) - update.layers[name] for name in names}
            change = {name: step[name] / (2 * 0.03) - c[name] for name in names}
            c_i[client] = {name: c_i[client][name] + change[name] for name in names}
            changes.append(change)
        c = {name: c[name] + sum(change[name] for change in changes) / 3 for name in names}
        for client in clients:
            kept = own_arrays(OWN, tmp_path, client, before=round + 1)
            assert kept.keys() == set(names)
            for name in names:
                np.testing.assert_allclose(kept[name], c_i[client][name], rtol=1e-4, atol=1e-5)
    state = federation.state.models["global"].strategy_state["control"]
    for name in names:
        np.testing.assert_allclose(state[name], sum(one[name] for one in c_i) / 3, rtol=1e-4, atol=1e-5)


def test_gradients_are_corrected_by_the_difference_of_control_variates(tmp_path):
    """One step from equal weights moves by lr (c_i - c) further than without a correction."""
    plain = Federation(tmp_path / "plain", "strategy=fedavg", "strategy.weighting=uniform", *SCAFFOLD[1:])
    corrected = Federation(tmp_path / "corrected", *SCAFFOLD)
    for federation in (plain, corrected):
        federation.run(1)
    for name, layer in plain.layers.items():  # no correction in round 1
        np.testing.assert_array_equal(corrected.layers[name], layer)
    for federation in (plain, corrected):
        federation.run(1)
    for reply, usual, client in zip(corrected.updates[3:], plain.updates[3:], range(3), strict=True):
        layers, others = (ClientUpdate.from_content(content, 0).layers for content in (reply, usual))
        c = TrainPlan.from_content(corrected.plans[3]).strategy_arrays
        c_i = own_arrays(OWN, tmp_path / "corrected", client, before=2)
        for name in corrected.method.trainable:
            np.testing.assert_allclose(layers[name] - others[name], 0.03 * (c_i[name] - c[name]), atol=2e-6)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_control_variates_are_never_rounded(tmp_path, dtype):
    federation = Federation(tmp_path, *SCAFFOLD, f"wire_dtype={dtype}")
    federation.run(2)
    assert not any(array.numpy().any() for array in federation.plans[0][STRATEGY_BROADCAST].values())
    c = federation.state.models["global"].strategy_state["control"]
    mean = {name: sum(own_arrays(OWN, tmp_path, client, before=3)[name] for client in range(3)) / 3 for name in c}
    for name, value in c.items():
        np.testing.assert_allclose(value, mean[name], rtol=1e-4, atol=1e-6)
    assert all(STRATEGY_UPLOAD in update for update in federation.updates)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({}, "layer w is missing"),
        ({"w": array(1, 2)}, "layer w has shape"),
        ({"w": array(np.nan)}, "layer w has values that are not finite"),
        ({"w": array(1), "v": array(1)}, "layer v is not part"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, reason):
    update = ClientUpdate(layers={"w": array(1)}, strategy_arrays=arrays, partition_id=0, plan_id=(1, "x"))
    like = GlobalLayers({"w": array(0)})
    with pytest.raises(InvalidUpdate, match=reason):
        update_validator().check(update, round=1, expected=like, arrays=like)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["optimizer=adam"], "set optimizer=sgd"),
        (["aggregation.buffered=true"], "set aggregation.buffered=false"),
        (["aggregation.round_deadline=60"], "round_deadline=60.* prevents; set aggregation.round_deadline=null"),
        (["aggregation.max_norm_ratio=3"], "max_norm_ratio prevents; set aggregation.max_norm_ratio=null"),
        (["aggregation.over_selection=1", "clients_per_round=2"], "over_selection=1 prevents; set .*over_selection=0"),
        (["aggregation.max_retries=2", "aggregation.min_updates=2"], "max_retries=2 prevents; set .*max_retries=0"),
        (["method=swav", "method.match_prototypes=true"], "prevents; set method.match_prototypes=false"),
        (["client_state.max_bytes=1000"], "set client_state.max_bytes=null"),
        (["secure_aggregation=secagg_plus", "num_clients=20"], "needs a strategy that adds up the clients"),
        (["tuning=lora", "tuning.rank=2", "tuning.aggregation=exact"], "is no weighted sum of the clients"),
    ],
)
def test_what_it_does_not_support_is_refused(tmp_path, overrides, reason):
    with pytest.raises(InputError, match=reason):
        Federation(tmp_path, "strategy=scaffold", *overrides)


def test_a_server_rate_scales_the_mean_change(tmp_path):
    half, whole = (Federation(tmp_path / str(lr), *SCAFFOLD, f"strategy.server_lr={lr}") for lr in (0.5, 1))
    start = {name: layer.copy() for name, layer in whole.layers.items()}
    half.run(1)
    whole.run(1)
    for name in whole.method.trainable:
        moved, whole_move = (one.layers[name] - start[name] for one in (half, whole))
        np.testing.assert_allclose(moved, whole_move / 2, rtol=1e-4, atol=1e-7)


def test_clients_that_never_train_do_not_count(tmp_path):
    """N are those with enough images, else c would stay below the mean of all c_i."""
    partition = ["partition=dirichlet", "partition.alpha=0.01", "partition.min_size=0", "num_clients=5", "seed=0"]
    federation = Federation(
        tmp_path, *SCAFFOLD, *partition, "method=fed_align_uniform", "method.projector.hidden_dim=8"
    )
    federation.run(2)
    trained = [row.client for row in federation.report.clients]
    assert trained == [0, 1, 2, 4]  # client 3 has two images
    controls = [own_arrays(OWN, tmp_path, client, before=3) for client in trained]
    for name, c in federation.state.models["global"].strategy_state["control"].items():
        np.testing.assert_allclose(c, sum(one[name] for one in controls) / 4, rtol=1e-4, atol=1e-6)


def test_clients_that_join_have_a_share():
    # c = 3 is the mean of two clients, whose sum is 6. A third one has 0 until it trains.
    assert for_clients({"w": array(3)}, before=2, now=3) == {"w": array(2)}
    layers = {"w": array(1)}
    server = Scaffold().server
    server._trainable = frozenset(layers)
    state = {}
    for number, total, expected in ((2, 6, 3), (3, 3, 3), (3, 0, 3)):
        aggregator = server.aggregator(1)
        aggregator.total = {"w": array(total)}
        model = GlobalModel(layers=layers, strategy_state=state)
        done = AggregatedModel(
            model=model, round=1, layers=layers, aggregator=aggregator, received={}, num_clients=number
        )
        state, _ = server.after_aggregation(done)
        assert state["control"]["w"].tolist() == [expected]
