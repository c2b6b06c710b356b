"""The bounds of a federation: all images in one place, and every client alone, with the budget of the federation."""

from statistics import mean, stdev

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.evaluation.protocol import make_evaluation_input
from fedssl.export import load_encoder
from simulation.run import run
from strategies.types import GLOBAL
from tests.arrays import same
from tests.federation import Federation
from tests.runs import read_lines, read_summary

FEDERATION = ["rounds=2", "local_epochs=2", "dataset.limit=60", "encoder.width=4", "threads=1", "batch_size=10"]
FEDERATION += ["measure_resources=false", "collapse_images=0"]
VIT = ["encoder=vit_tiny", "encoder.depth=2", "encoder.width=12", "encoder.patch=4"]  # its stages hand on weights


@pytest.mark.parametrize(
    ("method", "schedule", "encoder"),
    [
        ("orchestra", "end_to_end", []),
        ("byol", "layer_wise", VIT),
        *(pytest.param(method, "progressive", VIT, marks=pytest.mark.heavy) for method in ("byol", "orchestra")),
    ],
)
def test_one_client_alone_is_all_images_in_one_place(tmp_path, method, schedule, encoder):
    """With a single client the two bounds are the same run, bit for bit, and so is the client's model as it is seen."""
    one = [f"method={method}", "num_clients=1", "dataset.limit=40", "rounds=4", f"schedule={schedule}", *encoder]
    weighting = "strategy.weighting=uniform"  # multiplies by 1, so that nothing is rounded
    central = Federation(tmp_path / "central", *one, "strategy=fedavg", weighting)
    alone = Federation(tmp_path / "alone", *one, "strategy=local_only")
    seen: list[dict[str, np.ndarray]] = []
    for federation in (central, alone):
        federation.run(4, lambda client, layers: seen.append(copied(layers)))
    assert len(seen) == 8
    for one_way, other in zip(seen[:4], seen[4:], strict=True):
        assert same(one_way, other)
    (model,) = alone.state.models.values()
    for name, array in central.layers.items():
        np.testing.assert_array_equal(model.layers[name], array, err_msg=name)
    shared = central.state.models[GLOBAL].broadcast
    assert set(shared) == ({"centroids"} if method == "orchestra" else set())
    for name, array in shared.items():
        np.testing.assert_array_equal(model.broadcast[name], array, err_msg=name)
        assert array.any()


def copied(layers):
    return {name: array.copy() for name, array in layers.items()}


def test_clients_alone_are_reported_as_mean_and_all_exported(tmp_path):
    overrides = ["experiment=single_client", *FEDERATION, "num_clients=3", "evaluate_every=2", "final_evaluation=knn"]
    run([*overrides, f"output_dir={tmp_path}"])
    settings = compose(overrides)
    protocol = settings.evaluation.final_protocol.instantiate()
    accuracies = []
    for client in range(3):
        encoder = load_encoder(tmp_path / f"encoder-{client}.pt")
        subject = make_evaluation_input(encoder, settings.data, device=torch.device("cpu"))
        accuracies.append(protocol(subject, seed=0)["knn"].value)
    assert not (tmp_path / "encoder.pt").exists()
    assert len(set(accuracies)) > 1
    expected = {"knn": mean(accuracies), "knn_std": stdev(accuracies)}
    final = read_summary(tmp_path)["final"]
    assert final["federated"] == pytest.approx(expected)
    assert set(final["untrained"]) == set(final["pixels"]) == {"knn"}
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["evaluation"] == pytest.approx(expected)
