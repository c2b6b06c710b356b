"""The monitor of collapse in a run: who is measured, what is recorded, and the warning."""

import json
import logging

import pytest
import torch

from fedssl.config import compose
from fedssl.exchange import travelling_layers
from fedssl.methods import build
from server_app.monitor import Monitor, summary, warn_of_collapse
from simulation.cli import run

TINY = ["dataset.limit=60", "encoder.width=4", "threads=1", "num_clients=3", "local_epochs=1"]


def monitor(*words):
    settings = compose([*TINY, *words])
    method = build(settings)
    return Monitor(settings, method, torch.device("cpu")), travelling_layers(method)


def collapsed(layers):
    return {name: 0 * array if name.endswith("weight") else array for name, array in layers.items()}


def test_models_are_measured_on_the_same_pictures():
    watch, layers = monitor("health_pictures=40")
    watch.observe(2, layers)
    watch.observe(0, collapsed(layers))
    measured = watch.finish(layers)
    assert [row["client"] for row in measured] == [None, 2, 0]
    assert measured[1] | {"client": None} == measured[0]
    assert measured[2]["spread"] < 1e-6 < measured[0]["spread"]
    assert [row["client"] for row in watch.finish(layers)] == [None]  # clients of an earlier round are gone


def test_an_encoder_of_which_parts_are_missing_is_left_out():
    watch, layers = monitor()
    watch.observe(0, dict(list(layers.items())[1:]))
    assert len(watch.finish(layers)) == 1


def test_it_can_be_turned_off():
    watch, layers = monitor("health_pictures=0")
    watch.observe(0, layers)
    assert watch.finish(layers) == []


def test_summary_has_the_global_model_and_the_mean_of_the_clients():
    rows = [{"client": client, "spread": value, "singular_values": [1.0]} for client, value in ((None, 1.0), (0, 2.0))]
    assert summary([*rows, {"client": 1, "spread": 4.0}]) == {"global": {"spread": 1.0}, "clients": {"spread": 3.0}}
    assert summary(rows[:1]) == {"global": {"spread": 1.0}}


def test_collapse_is_told(caplog):
    healthy = {"client": None, "spread": 0.5, "effective_rank": 30.0}
    with caplog.at_level(logging.WARNING, logger="fedssl"):
        warn_of_collapse([healthy])
        assert not caplog.records
        warn_of_collapse([healthy, {"client": 3, "spread": 0.5, "effective_rank": 1.1}])
    assert "the representation has collapsed in client 3: effective rank 1.1, spread 0.500" in caplog.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    run([*TINY, "rounds=3", "evaluate_every=2", "final_evaluation=none", f"output_dir={folder}"])
    return folder


def test_a_run_records_and_draws_it(folder):
    rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert ["health" in line for line in rounds] == [False, True, True]
    rows = [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]
    assert [(row["round"], row["client"]) for row in rows] == [(r, c) for r in (2, 3) for c in (None, 0, 1, 2)]
    assert rows[0]["singular_values"] == sorted(rows[0]["singular_values"], reverse=True)
    assert (folder / "figures" / "spectrum.png").stat().st_size > 0


def test_measuring_changes_no_number_of_the_training(folder, tmp_path):
    run([*TINY, "rounds=3", "evaluate_every=0", "final_evaluation=none", f"output_dir={tmp_path / 'out'}"])
    one, other = (
        [json.loads(line)["cosine"] for line in (place / "metrics.jsonl").read_text().splitlines()]
        for place in (folder, tmp_path / "out")
    )
    assert one == other
