"""FedDyn: both sides by a slow transcription of Algorithm 1, and its limit for a small alpha."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedssl.errors import InputError
from fedssl.regularizers.base import RegularizerInput
from fedssl.regularizers.linear import Linear
from fedssl.wire.messages import ClientUpdate, TrainPlan
from strategies.feddyn import OWN, FedDyn
from strategies.types import AggregatedModel, GlobalModel
from strategies.weighted_sum import WeightedSum
from tests.federation import Federation
from tests.server_app.small import Small
from tests.strategies.clients import own_arrays, start_of

PLAIN = ["optimizer.momentum=0", "optimizer.weight_decay=0"]


def test_the_gradient_of_a_linear_term_is_its_slope():
    method, term = Small(), Linear()  # with the weights (1, 2, 2)
    step = RegularizerInput(method, None, (), None)
    assert term.apply(torch.tensor(10.0), step).item() == 10  # nothing is loaded
    for slope in ({"encoder.weight": np.array([2, -1, 3], np.float32)}, {}):
        method.zero_grad()
        term.load(method, slope)
        loss = term.apply(torch.tensor(10.0), step)
        assert loss.item() == 10
        loss.backward()
        assert method.encoder.weight.grad.tolist() == slope.get("encoder.weight", np.zeros(3)).tolist()


@pytest.mark.parametrize("method", ["simclr", "swav"])
def test_rounds_equal_a_slow_transcription(tmp_path, method):
    """Algorithm 1 in float64 on what clients sent, with h of the paper instead of H = -h / alpha."""
    alpha = 0.5
    options = ["strategy=feddyn", f"strategy.alpha={alpha}", "clients_per_round=2", f"method={method}"]
    options += ["method.freeze_prototypes_rounds=0", "optimizer.lr=1"] if method == "swav" else []
    federation = Federation(tmp_path, *options)
    names = federation.method.trainable
    h = dict.fromkeys(names, 0.0)
    g = [dict(h) for _ in range(3)]
    for round in (1, 2, 3):
        sent = len(federation.updates)
        federation.run(1)
        clients = [row.client for row in federation.report.clients]
        plan = TrainPlan.from_content(federation.plans[sent])
        models = [ClientUpdate.from_content(update, 0).layers for update in federation.updates[sent:]]
        for name in names:
            moves = [model[name].astype(np.float64) - plan.layers[name] for model in models]
            h[name] = h[name] - alpha * sum(moves) / 3
            new = sum(model[name].astype(np.float64) for model in models) / 2 - h[name] / alpha
            np.testing.assert_allclose(federation.layers[name], new, rtol=1e-4, atol=1e-5)
            for client, model in zip(clients, models, strict=True):
                g[client][name] = g[client][name] - alpha * (model[name] - start_of(plan, name))
        for client in clients:
            for name, value in own_arrays(OWN, tmp_path, client, before=round + 1).items():
                np.testing.assert_allclose(value, g[client][name], rtol=1e-4, atol=1e-6)


def test_a_step_is_corrected_by_both_terms(tmp_path):
    """One step of 0.03 from w_g, where the proximal term is flat: it moves by 0.03 g_k more than without."""
    dynamic = Federation(tmp_path / "dynamic", "strategy=feddyn", "strategy.alpha=0.5", *PLAIN)
    dynamic.run(2)
    plan, update = dynamic.plans[3], ClientUpdate.from_content(dynamic.updates[3], 0).layers
    plain = Federation(tmp_path / "plain", "strategy=fedavg", "strategy.weighting=uniform", *PLAIN)
    plain.run(1)
    start = TrainPlan.from_content(plan).layers
    model = replace(plain.state.models["global"], layers={name: start[name] for name in plain.layers})
    plain.state = replace(plain.state, models={"global": model})
    plain.run(1)
    usual = ClientUpdate.from_content(plain.updates[3], 0).layers
    for name, value in own_arrays(OWN, tmp_path / "dynamic", 0, before=2).items():
        np.testing.assert_allclose(update[name] - usual[name], 0.03 * value, atol=2e-6)


def test_a_small_alpha_leaves_the_step_of_the_server(tmp_path):
    dynamic = Federation(tmp_path / "dynamic", "strategy=feddyn", "strategy.alpha=1e-12")
    average = Federation(tmp_path / "average", "strategy=fedavg", "strategy.weighting=uniform")
    start = {name: layer.copy() for name, layer in average.layers.items()}
    dynamic.run(1)
    average.run(1)
    for name, mean in average.layers.items():
        twice = 2 * mean - start[name] if name in average.method.trainable else mean
        np.testing.assert_allclose(dynamic.layers[name], twice, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["privacy=central", "encoder.norm=group"], "noise to the mean of the clients, which strategy=feddyn changes"),
        (["aggregation.buffered=true"], "set aggregation.buffered=false"),
        (
            ["secure_aggregation=secagg_plus", "num_clients=20", "clients_per_round=10", "aggregation.max_retries=1"],
            "counts once; set aggregation.max_retries=0",
        ),
        (["tuning=lora", "tuning.rank=2", "tuning.aggregation=svd"], "set tuning.aggregation=factors"),
    ],
)
def test_what_it_does_not_support_is_refused(tmp_path, overrides, reason):
    with pytest.raises(InputError, match=reason):
        Federation(tmp_path, "strategy=feddyn", *overrides)


def test_clients_that_never_train_do_not_count(tmp_path):
    """With all others the share of the clients is 1, and the first round moves twice as far as their mean."""
    partition = ["partition=dirichlet", "partition.alpha=0.01", "partition.min_size=0", "num_clients=5", "seed=0"]
    head = ["method=fed_align_uniform", "method.projector.hidden_dim=8"]
    federation = Federation(tmp_path, "strategy=feddyn", *partition, *head)
    federation.run(1)
    assert [row.client for row in federation.report.clients] == [0, 1, 2, 4]  # client 3 has two images
    start = TrainPlan.from_content(federation.plans[0]).layers
    models = [ClientUpdate.from_content(update, 0).layers for update in federation.updates]
    for name in federation.method.trainable:
        mean = sum(model[name].astype(np.float64) for model in models) / 4
        np.testing.assert_allclose(federation.layers[name], 2 * mean - start[name], rtol=1e-4, atol=1e-5)


def test_clients_that_join_have_a_share():
    """H is a mean over all clients: of two at first, then of three, of which all three train."""
    server, start, step = FedDyn().server, {"w": np.array([1.0], np.float32)}, {}
    server._trainable = frozenset(start)
    for number, mean, expected in ((2, 4, 3), (3, 1, 2)):  # 4 - 1, then 3 * 2 / 3 + 1 - 1
        model = GlobalModel(layers=start, strategy_state=step)
        received = dict.fromkeys(range(number), ("w",))
        layers = {"w": np.array([mean], np.float32)}
        done = {"model": model, "round": 1, "layers": layers, "aggregator": WeightedSum()}
        layers, step = server.server_step(AggregatedModel(**done, received=received, num_clients=number))
        assert step["step"]["w"].tolist() == [expected]
        assert layers["w"].tolist() == [mean + expected]
