"""The monitor of collapse in a run: who is measured, what is recorded, and the warning."""

import logging

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.datasets.base import load_split
from fedssl.methods.base import FailureMode, build_method
from fedssl.methods.simclr import SimCLR
from fedssl.model_arrays import exchanged_layers
from fedssl.runs.representations import read_representations
from server_app.collapse_monitor import CollapseMonitor, summarize_health, warn_of_collapse
from simulation.run import run
from strategies.types import GLOBAL
from tests.runs import read_lines

TINY = ["dataset.limit=60", "encoder.width=4", "threads=1", "num_clients=3", "local_epochs=1"]


def monitor(*overrides):
    settings = compose([*TINY, *overrides])
    method = build_method(settings.model)
    watch = CollapseMonitor(
        method,
        data=settings.data,
        num_images=settings.evaluation.collapse_images,
        augment=settings.training.augmentation.instantiate(),
        device=torch.device("cpu"),
        seed=settings.seed,
    )
    return watch, exchanged_layers(method)


def collapsed(layers):
    return {name: 0 * array if name.endswith("weight") else array for name, array in layers.items()}


def test_models_are_measured_on_the_same_images():
    watch, layers = monitor("collapse_images=40")
    watch.observe(2, layers)
    watch.observe(0, collapsed(layers))
    rows = watch.finish({GLOBAL: layers}, used=[0, 2]).rows
    assert [row["client"] for row in rows] == [None, 2, 0]
    assert rows[1] | {"client": None, "model": GLOBAL} == rows[0]
    assert rows[2]["spread"] < 1e-6 < rows[0]["spread"]
    assert [row["client"] for row in watch.finish({GLOBAL: layers}, used=[0, 2]).rows] == [
        None
    ]  # clients of an earlier round are gone


def test_clients_of_a_repeated_attempt_are_left_out(caplog):
    watch, layers = monitor("collapse_images=40")
    huge = {name: array * np.float32(1e30) if name.endswith("weight") else array for name, array in layers.items()}
    for client in (1, 2):
        watch.observe(client, layers)
    watch.observe(4, huge)
    watch.observe(2, collapsed(layers))  # in the second attempt
    report = watch.finish({GLOBAL: layers}, used=[2])
    assert [row["client"] for row in report.rows] == [None, 2]
    assert report.rows[1]["spread"] < 1e-6
    assert report.representations.names.tolist() == ["global model", "client 2"]
    assert "client 4" not in caplog.text


def test_representations_of_test_images_are_kept():
    watch, layers = monitor("collapse_images=40", "method.projector.out_dim=5")
    watch.observe(2, layers)
    watch.observe(0, collapsed(layers))
    kept = watch.finish({GLOBAL: layers}, used=[0, 2]).representations
    assert kept.globals == 1
    assert kept.names.tolist() == ["global model", "client 2", "client 0"]
    assert kept.h.shape == (3, 40, 16)
    assert kept.h.dtype == np.float16
    assert kept.z is None
    np.testing.assert_array_equal(kept.h[0], kept.h[1])
    np.testing.assert_allclose(np.linalg.norm(kept.h[0].astype(float), axis=1), 1, atol=1e-3)
    # Among all test images, those with these representations have these labels.
    settings = compose(TINY)
    data = settings.data
    test, encoder = load_split(data, "test"), build_method(settings.model).encoder.eval()
    with torch.no_grad():
        everything = encoder((test.images[:] / 255 - data.mean[0]) / data.std[0])
    distance = torch.cdist(torch.from_numpy(kept.h[0]).float(), torch.nn.functional.normalize(everything))
    assert distance.amin(dim=1).max() < 1e-3
    np.testing.assert_array_equal(test.labels[distance.argmin(dim=1)], kept.labels)


def test_a_model_without_numbers_is_left_out_and_told(caplog):
    """Weights that are finite, as is checked in every update, and representations that are not."""
    watch, layers = monitor()
    huge = {name: array * np.float32(1e30) if name.endswith("weight") else array for name, array in layers.items()}
    with caplog.at_level(logging.WARNING, logger="fedssl"):
        watch.observe(3, huge)
        watch.observe(5, huge)
        assert len(watch.finish({GLOBAL: layers}, used=[3, 5]).rows) == 1
        assert watch.finish({GLOBAL: huge}, used=[]) is None
    texts = [record.message.partition(",")[0] for record in caplog.records]
    assert texts == ["client 3", "the global model: representations are NaN or infinite"]
    assert caplog.records[0].message == (
        "client 3, client 5: representations are NaN or infinite, so the training has diverged; lower optimizer.lr"
    )


class Diagnosed(SimCLR):
    """Reports the mean absolute weight of the projector and the number of images."""

    failure_modes = (
        FailureMode(diagnostic="weight", minimum=1e-3, message="the projector is zero; lower optimizer.lr"),
        FailureMode(diagnostic="images", maximum=20, message="too many images"),
    )

    def diagnose(self, views):
        assert not self.training
        assert not torch.is_grad_enabled()
        assert len(views) == 2
        return {"weight": self.projector[0].weight.abs().mean().item(), "images": float(views.num_images)}


def test_failure_modes_of_the_method_are_reported_for_global_models():
    watch, layers = monitor("collapse_images=20")
    watch._method.__class__ = Diagnosed
    watch.observe(2, collapsed(layers))
    report = watch.finish(
        {"a": layers, "b": {**layers, "projector.0.weight": 0 * layers["projector.0.weight"]}}, used=[2]
    )
    assert report.failures == ("model b: the projector is zero; lower optimizer.lr (weight 0, below 0.001)",)
    assert [row.get("images") for row in report.rows] == [20.0, 20.0, None]
    assert summarize_health(report.rows)["global"]["images"] == 20


def test_collapse_is_told(caplog):
    healthy = {"client": None, "model": GLOBAL, "spread": 0.5, "effective_rank": 30.0, "covariance_rank": 9.0}
    with caplog.at_level(logging.WARNING, logger="fedssl"):
        warn_of_collapse([healthy])
        assert not caplog.records
        for client, (name, value) in enumerate({"spread": 0.01, "effective_rank": 1.1, "covariance_rank": 1.7}.items()):
            warn_of_collapse([healthy, {**healthy, "client": client, name: value}])
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"the representation has collapsed in client {client}" for client in range(3)
    ]
    assert caplog.records[2].message.endswith(
        "in client 2: effective rank 30, covariance rank 1.7 (below 2), spread 0.5; lower optimizer.lr, raise "
        "batch_size, or set another method"
    )
    with caplog.at_level(logging.WARNING, logger="fedssl"):
        warn_of_collapse([{**healthy, "spread": 0.0}])
        warn_of_collapse([{**healthy, "model": "a", "spread": 0.0}, {**healthy, "model": "b", "spread": 0.0}])
    assert [record.message.partition(":")[0] for record in caplog.records[3:]] == [
        "the representation has collapsed in the global model",
        "the representation has collapsed in model a, model b",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    run([*TINY, "rounds=3", "evaluate_every=2", "final_evaluation=none", f"output_dir={folder}"])
    return folder


def test_a_run_records_and_draws_it(folder):
    rounds = read_lines(folder / "metrics.jsonl")
    assert ["health" in line for line in rounds] == [False, True, True]
    rows = read_lines(folder / "health.jsonl")
    assert [(row["round"], row["client"]) for row in rows] == [(r, c) for r in (2, 3) for c in (None, 0, 1, 2)]
    assert [row["model"] for row in rows if row["client"] is None] == [GLOBAL, GLOBAL]
    spectrum = rows[0]["spectrum"]
    assert spectrum["singular_values"] == sorted(spectrum["singular_values"], reverse=True)
    assert (spectrum["split"], spectrum["images"], spectrum["dim"]) == ("test", 256, 16)
    assert (folder / "figures" / "spectrum.png").stat().st_size > 0
    round, kept = read_representations(folder)
    assert round == 3  # the last one
    assert kept.names.tolist() == ["global model", "client 0", "client 1", "client 2"]
    assert kept.globals == 1
