"""Models that a run keeps, and every figure that looks into them, of one small run."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.model_arrays import load_layers
from fedssl.plots import landscape
from fedssl.plots.cka import centered_gram, cka_matrix, layer_outputs
from fedssl.plots.forgetting import ClientForgetting, mean_forgetting
from fedssl.report.cli import main
from fedssl.rules import check_rules
from fedssl.runs.loaded_run import LoadedRun, load_run_folder
from fedssl.runs.snapshots import (
    finish_round,
    read_snapshot_layers,
    remove_later_snapshots,
    save_layers,
    snapshot_rounds,
)
from fedssl.seeding import torch_generator
from server_app.checkpoint import latest_checkpoint
from server_app.rules import SETTINGS_RULES
from simulation.run import run

TINY = ["dataset.limit=120", "encoder.width=4", "threads=1", "num_clients=2", "local_epochs=1", "rounds=2"]
DRAWN = ("partition", "cka", "landscape", "cka_layers", "forgetting")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two clients and two rounds, with its figures."""
    folder = tmp_path_factory.mktemp("kept") / "out"
    more = ["strategy=fedavg", "snapshot_every=1", "evaluate_every=1", "final_evaluation=knn", "collapse_images=20"]
    run([*TINY, *more, "engine=local", f"output_dir={folder}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(landscape, "GRID_POINTS", 3)
        patch.setattr(sys, "argv", ["fedssl-report", str(folder), "--figures", *DRAWN, "accuracy"])
        assert main() == 0
    return folder


@pytest.fixture(scope="module")
def opened(folder: Path) -> LoadedRun:
    return load_run_folder(folder, [])


def rows_of(folder: Path, name: str) -> list[list[str]]:
    with (folder / "figures" / f"{name}.csv").open(newline="") as stream:
        return list(csv.reader(stream))[1:]


@pytest.mark.heavy
def test_every_figure_is_there_in_every_form(folder: Path):
    for name in (*DRAWN, "accuracy"):
        files = [folder / "figures" / f"{name}.{end}" for end in ("png", "pdf", "csv")]
        assert [file.read_bytes()[:4] for file in files[:2]] == [b"\x89PNG", b"%PDF"]
        assert len(files[2].read_text().splitlines()) > 1


def test_kept_models_are_those_of_the_round(folder: Path, opened: LoadedRun):
    assert [one.round for one in opened.snapshots] == [1, 2]
    last = opened.snapshots[-1]
    assert (list(last.models), list(last.clients)) == (["global"], [0, 1])
    model = opened.layers(last.models["global"])
    state = latest_checkpoint(folder / "checkpoints")
    expected = state.models["global"].layers
    assert list(model) == list(expected)
    assert all((model[name] == expected[name]).all() for name in model)
    # FedAvg: the model after the round is the mean of what clients sent, by their images.
    lines = map(json.loads, (folder / "clients.jsonl").read_text().splitlines())
    shares = {line["client"]: line["examples"] / 120 for line in lines if line["round"] == 2}
    sent = {client: opened.layers(file) for client, file in last.clients.items()}
    name = next(name for name in model if name.endswith("weight"))
    mean = sum(shares[client] * sent[client][name].astype(np.float64) for client in (0, 1))
    np.testing.assert_allclose(model[name], mean, atol=1e-6)


def test_landscape_has_the_loss_of_its_models(folder: Path, opened: LoadedRun):
    trajectory = [row for row in rows_of(folder, "landscape") if row[0] == "model"]
    assert [row[1] for row in trajectory] == ["0", "1", "2"]
    assert [float(cell) for cell in trajectory[-1][3:5]] == [0, 0]  # the last model is the origin
    kinds = [row[0] for row in rows_of(folder, "landscape")]
    assert (kinds.count("client"), kinds.count("grid")) == (2, 9)
    # The loss of the last model, by the method itself, on the same views: one whole batch of 64 of the 120 images.
    method = build_method(opened.settings.model)
    load_layers(method, opened.layers(opened.snapshots[-1].models["global"]))
    images, _ = opened.images(landscape.MAX_IMAGES)
    views = opened.settings.training.augmentation.instantiate()(
        images[:64], torch_generator(opened.settings.seed, "landscape views")
    )
    with torch.no_grad():
        expected = float(method.train().loss(views))
    assert float(trajectory[-1][5]) == pytest.approx(expected, rel=1e-6)
    assert float(trajectory[0][5]) > expected


def test_cka_of_layers_is_that_of_their_outputs(folder: Path, opened: LoadedRun):
    kept = opened.snapshots[-1]
    images, _ = opened.images(256)
    outputs = []
    for client in (0, 1):
        with opened.loaded(kept.clients[client], round=2) as method:
            outputs.append(layer_outputs(method.encoder, images, run=opened))
    assert list(outputs[0]) == [*method.encoder.stage_names, "h"]
    pairs = zip(*map(dict.values, outputs), strict=True)
    expected = [cka_matrix([centered_gram(a)], [centered_gram(b)])[0, 0] for a, b in pairs]
    rows = rows_of(folder, "cka_layers")
    pairs = [float(row[4]) for row in rows if row[0] == "client 0"]
    np.testing.assert_allclose(pairs, expected)
    assert len(rows) == 5 * 5 + 5


def test_forgetting_is_the_accuracy_that_aggregation_takes_away():
    def measured(round, client, local, after):
        matched = {"local_matched": local, "global_matched": after}
        return ClientForgetting(round=round, client=client, **matched, local_all=0.1, global_all=0.2)

    # 0.75 - 0.5 = 0.25 and 0.5 - 0.75 = -0.25, whose mean is 0 and deviation sqrt(2 x 0.25^2); 1 - 0.25 = 0.75 alone.
    found = [measured(2, 0, 1.0, 0.25), measured(1, 0, 0.75, 0.5), measured(1, 1, 0.5, 0.75)]
    assert [one.forgetting for one in found] == [0.75, 0.25, -0.25]
    assert mean_forgetting(found) == {1: (0.0, pytest.approx(0.125**0.5)), 2: (0.75, None)}


def test_damaged_models_are_named(tmp_path: Path):
    like = {"encoder.weight": torch.zeros(2)}
    save_layers(tmp_path, 7, "model-global", {"encoder.weight": np.ones(2, dtype=np.float32)})
    (kept,) = snapshot_rounds(tmp_path)
    assert kept.round == 7
    np.testing.assert_array_equal(read_snapshot_layers(kept.models["global"], like)["encoder.weight"], [1, 1])
    bad = [{"encoder.weight": np.ones(3, dtype=np.float32)}, {"other": np.ones(2, dtype=np.float32)}]
    bad += [{"encoder.weight": np.ones(2)}, {"encoder.weight": np.array([1, np.nan], dtype=np.float32)}]
    for layers in bad:
        save_layers(tmp_path, 7, "model-global", layers)
        with pytest.raises(InputError, match=r"model-global.pt cannot be used \(it does not contain layers of this"):
            read_snapshot_layers(kept.models["global"], like)
    kept.models["global"].write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"model-global.pt cannot be used \(it does not contain layers\)"):
        read_snapshot_layers(kept.models["global"], like)


def test_only_what_was_used_of_a_finished_round_counts(tmp_path: Path):
    layers = {"encoder.weight": np.ones(2, dtype=np.float32)}
    save_layers(tmp_path, 3, "client-0", layers)
    save_layers(tmp_path, 3, "client-4", layers)
    with pytest.raises(InputError, match="has no snapshots of models"):
        snapshot_rounds(tmp_path)
    finish_round(tmp_path, 3, {"global": layers}, used=[4])  # client 0 was in an attempt that failed
    (kept,) = snapshot_rounds(tmp_path)
    assert list(kept.clients) == [4]
    finish_round(tmp_path, 5, {"global": layers}, used=[])
    remove_later_snapshots(tmp_path, 3)  # resumed behind round 3
    assert [one.round for one in snapshot_rounds(tmp_path)] == [3]
    assert [place.name for place in (tmp_path / "models").iterdir()] == ["round-000003"]


def test_a_sum_has_no_models_of_clients():
    message = "secure_aggregation=secagg_plus reveals no client's model; set snapshot_every=0"
    with pytest.raises(InputError, match=message):
        check_rules(SETTINGS_RULES, compose(["secure_aggregation=secagg_plus", "snapshot_every=1"]))
