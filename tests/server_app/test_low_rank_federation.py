"""Federations with tuning=lora: what travels, the global weights against the clients' uploads, resuming, refusals."""

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.export import load_encoder
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_names, load_layers, read_layers
from fedssl.wire.messages import ARRAYS, BASE, ClientUpdate, TrainPlan
from server_app.checkpoint import latest_checkpoint
from simulation.run import run
from tests.cases import some
from tests.federation import TINY, Federation
from tests.resuming import repeat_from
from tests.runs import model_bits

LORA = ["tuning=lora", "tuning.rank=2", "tuning.alpha=4", "method.projector.hidden_dim=8"]
AGGREGATIONS = ("factors", "freeze_a", "exact", "stack", "svd")
every_aggregation = pytest.mark.parametrize("aggregation", some(AGGREGATIONS, default=("exact", "svd")))


def federation(folder, aggregation, *overrides):
    overrides = ["num_clients=2", "strategy=fedavg", "strategy.weighting=uniform", *overrides]
    return Federation(folder, *LORA, f"tuning.aggregation={aggregation}", *overrides)


def totals(layers, method):
    """W + s B A of every layer with LoRA in float64, from layers and the method's base layers."""
    known = read_layers(method, [*method.base_names, *method.server_merged_names]) | layers
    return {
        pair.weight: known[pair.weight].astype(np.float64)
        + pair.scale * (known[pair.b].astype(np.float64) @ known[pair.a]).reshape(known[pair.weight].shape)
        for pair in method.low_rank_layers
    }


@every_aggregation
def test_the_global_weights_are_the_means_of_the_clients_weights(tmp_path, aggregation):
    federated = federation(tmp_path, aggregation)
    method, before = federated.method, {}
    for _ in range(2):
        first = len(federated.plans)
        layers = federated.run(1)
        plans = [TrainPlan.from_content(content) for content in federated.plans[first:]]
        updates = [ClientUpdate.from_content(content, 0).layers for content in federated.updates[first:]]
        for name in method.server_merged_names:  # also of a client that starts later
            assert all(np.array_equal(plan.layers[name], before.get(name, plans[0].layers[name])) for plan in plans)
        before = layers
        clients = [totals(plan.layers | update, method) for plan, update in zip(plans, updates, strict=True)]
        found = totals(layers, method)
        for name, total in found.items():
            mean = np.mean([client[name] for client in clients], axis=0)
            if aggregation in ("freeze_a", "exact", "stack"):
                np.testing.assert_allclose(total, mean, atol=1e-6)
            if aggregation == "svd":
                weight = read_layers(method, [name])[name].astype(np.float64)
                s = np.linalg.svd((mean - weight).reshape(len(weight), -1), compute_uv=False)
                assert np.linalg.norm(total - mean) == pytest.approx(np.sqrt((s[2:] ** 2).sum()), rel=1e-3, abs=1e-6)
    start = totals(plans[0].layers, method)
    assert max(np.abs(found[name] - start[name]).max() for name in found) > 1e-3  # training has changed the weights


@every_aggregation
def test_factors_and_weights_changed_by_the_server_are_sent(tmp_path, aggregation):
    federated = federation(tmp_path, aggregation)
    federated.run(2)
    method = federated.method
    merged = set(method.server_merged_names)
    assert bool(merged) == (aggregation in ("exact", "stack"))
    assert merged.isdisjoint(method.base_names)
    for plan, update in zip(federated.plans, federated.updates, strict=True):
        assert plan.array_records[ARRAYS].keys() == set(exchanged_names(method))
        assert update.array_records[ARRAYS].keys() == set(exchanged_names(method)) - merged
        a_is_sent = any(name.endswith("lora_A") for name in update.array_records[ARRAYS])
        assert a_is_sent == (aggregation != "freeze_a")
    # What nothing changes is sent once.
    assert [BASE in plan.array_records for plan in federated.plans] == [True, True, False, False]
    assert federated.plans[0].array_records[BASE].keys() == set(method.base_names)


@pytest.mark.parametrize(
    ("strategy", "aggregation"),
    [
        ("l_dawa", "svd"),
        ("eua", "stack"),
        ("gossip", "svd"),
        ("euc", "freeze_a"),
        *(pytest.param("l_dawa", one, marks=pytest.mark.heavy) for one in ("factors", "freeze_a", "exact")),
        *(pytest.param("eua", one, marks=pytest.mark.heavy) for one in ("freeze_a", "exact", "svd")),
        *(pytest.param(*pair, marks=pytest.mark.heavy) for pair in [("clustered", "svd"), ("fedu", "stack")]),
    ],
)
def test_strategies_compare_products_under_every_aggregation(tmp_path, strategy, aggregation):
    federated = Federation(tmp_path, *LORA, f"tuning.aggregation={aggregation}", f"strategy={strategy}")
    federated.run(2)
    assert not federated.report.dropped
    measured = {name for row in federated.report.clients for name in row.cosine}
    products = set(federated.method.product_names.values())
    assert products
    assert {name for name in measured if name.startswith("encoder.")} <= products
    assert strategy == "euc" or products <= measured  # which averages some every second round only


@pytest.mark.heavy
@pytest.mark.parametrize("aggregation", ["stack", "exact"])
def test_a_resumed_run_ends_with_equal_bits_and_merged_encoder(tmp_path, aggregation):
    folder = tmp_path / "run"
    overrides = [*TINY, *LORA, f"tuning.aggregation={aggregation}", "rounds=2", "strategy=fedavg", "keep_checkpoints=2"]
    run([*overrides, f"output_dir={folder}"])
    layers = latest_checkpoint(folder / "checkpoints").models["global"].layers
    assert model_bits(repeat_from(1, folder)) == model_bits(folder)
    # encoder.pt: the weights in which the products are merged.
    method = build_method(compose([*overrides, f"output_dir={folder}"]).model)
    load_layers(method, layers)
    images = torch.rand(4, 1, 8, 8)
    encoder = load_encoder(folder / "encoder.pt")
    with torch.no_grad():
        expected = method.eval().encoder(images)
        torch.testing.assert_close(encoder(images), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["svd", pytest.param("stack", marks=pytest.mark.heavy)])
def test_clients_of_different_ranks(tmp_path, aggregation):
    federated = federation(tmp_path, aggregation, "tuning.ranks=[1,2]", "num_clients=4")
    federated.run(2)
    assert not federated.report.dropped
    for plan, update in zip(federated.plans, federated.updates, strict=True):
        records = (content.array_records[ARRAYS].items() for content in (update, plan))
        sent, received = ({name: array.shape for name, array in record if "lora" in name} for record in records)
        assert sent == received
    records = [plan.array_records[ARRAYS].items() for plan in federated.plans]
    ranks = [{array.shape[0] for name, array in record if name.endswith("lora_A")} for record in records]
    assert ranks == [{1}, {2}, {1}, {2}] * 2
    small, large, *_ = federated.report.clients
    assert small.bytes_up < large.bytes_up


@pytest.mark.parametrize("when", ["start", "end"])
def test_calibrated_factors_of_a_smaller_rank_are_the_nearest(tmp_path, when):
    """A client of rank 1 receives the largest singular vectors of the calibrated product."""
    own = ["tuning.ranks=[1,2]", "calibration=auxiliary", f"calibration.when={when}", "calibration.share=0.2"]
    federated = federation(tmp_path, "svd", *own)
    federated.run(2)
    small, large = (TrainPlan.from_content(content).layers for content in federated.plans[-2:])
    for pair in federated.method.low_rank_layers:
        u, s, vt = np.linalg.svd(large[pair.b].astype(np.float64) @ large[pair.a])
        assert s[0] > 1e-6
        np.testing.assert_allclose(small[pair.b] @ small[pair.a], s[0] * np.outer(u[:, 0], vt[0]), atol=1e-5 * s[0])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["strategy=median", "tuning.aggregation=svd"], "strategy=median is no weighted sum of the clients"),
        (["strategy=l_dawa", "tuning.aggregation=stack"], "tuning.aggregation=stack resets to zero"),
        (["strategy=l_dawa", "strategy.scale_at=client", "tuning.aggregation=stack"], "resets to zero"),
        (["strategy=fedema", "tuning.aggregation=exact"], "keep factors of their own"),
        (["strategy=moon", "tuning.aggregation=exact"], "strategy=moon keep factors of their own"),
        (["strategy=per_ssl", "tuning.aggregation=stack"], "strategy=per_ssl keep factors of their own"),
        (["regularizer=l2_sp", "tuning.aggregation=stack"], "regularizer=l2_sp compares with the initial encoder"),
        (["strategy=fedu", "method=byol", "strategy.update=target", "tuning.aggregation=exact"], "factors of their"),
        (["strategy=euc", "tuning.aggregation=stack"], "keep factors of their own"),
        (["server_optimizer=fedavgm", "tuning.aggregation=exact"], "server_optimizer needs sums of layers"),
        (["aggregation.buffered=true", "tuning.aggregation=svd"], "aggregation.buffered=true needs sums of layers"),
        (
            ["secure_aggregation=secagg_plus", "secure_aggregation.dropout_fraction=0", "tuning.aggregation=exact"],
            "secure_aggregation=secagg_plus needs sums",
        ),
        (
            [
                *("privacy=central", "encoder=vit_tiny", "encoder.width=12", "tuning.aggregation=svd"),
                *("strategy=fedavg", "strategy.weighting=uniform"),
            ],
            "privacy=central needs sums",
        ),
        (["strategy=fedema", "tuning.aggregation=svd"], "keep factors of their own, which have another basis"),
        (["strategy=per_ssl", "tuning.aggregation=svd"], "keep factors of their own, which have another basis"),
        (["regularizer=l2_sp", "tuning.aggregation=svd"], "regularizer=l2_sp compares with the initial factors"),
        (["method=byol", "tuning.aggregation=svd"], "=persist keeps factors of target networks, which have another"),
        (["method=byol", "tuning.aggregation=stack"], "method.target_init=persist keeps factors of target networks"),
        (["method=byol", "method.target_init=average", "tuning.aggregation=exact"], "method.target_init=average keeps"),
        (["tuning.ranks=[1,2]", "tuning.aggregation=exact"], r"tuning.ranks=\[1, 2\] needs"),
        (["tuning.ranks=[1,4]", "tuning.aggregation=svd"], r"tuning.ranks=\[1, 4\] must be ranks up to tuning.rank=2"),
        (["tuning.aggregation=mean"], "tuning.aggregation=mean"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        Federation(tmp_path, *LORA, *overrides)
