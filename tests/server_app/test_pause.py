"""Runs that pause after a round, and continue with the same bits."""

import json

import pytest

from fedssl.errors import InputError
from fedssl.runs.run import read_run
from simulation.run import run

QUICK = ["num_clients=2", "rounds=3", "local_epochs=1", "dataset.limit=24", "dataset.test_limit=12", "encoder.width=2"]
QUICK += ["threads=1", "partition=iid", "evaluate_every=1", "final_evaluation=knn", "collapse_images=0"]
QUICK += ["measure_resources=false", "augmentation=none", "batch_size=8", "lr_schedule=cosine"]


def status(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return summary["status"], summary["rounds"], summary["reason"]


@pytest.mark.parametrize("checkpoint_every", [3])
def test_a_paused_run_continues_with_the_same_bits(tmp_path, checkpoint_every):
    overrides = [*QUICK, f"checkpoint_every={checkpoint_every}"]
    run([*overrides, f"output_dir={tmp_path / 'whole'}"])
    paused = tmp_path / "paused"
    run([*overrides, "pause_after=1", f"output_dir={paused}"])
    assert status(paused) == ("paused", 1, "paused after round 1 of 3")
    assert not (paused / "encoder.pt").exists()
    assert f"paused after round 1; continue with: fedssl resume={paused}" in (paused / "run.log").read_text()
    run([f"resume={paused}", "pause_after=2"])
    assert status(paused) == ("paused", 2, "paused after round 2 of 3")
    run([f"resume={paused}"])  # the pause is not inherited
    assert status(paused) == ("finished", 3, None)
    assert (paused / "encoder.pt").read_bytes() == (tmp_path / "whole" / "encoder.pt").read_bytes()
    assert read_run(paused).command_overrides == read_run(tmp_path / "whole").command_overrides


def test_an_invalid_round_is_one_sentence():
    with pytest.raises(InputError, match="pause_after=0 must be an integer of at least 1, or null"):
        run([*QUICK, "pause_after=0"])


def test_a_pause_at_or_after_the_last_round_has_no_effect(tmp_path):
    run([*QUICK, "pause_after=3", f"output_dir={tmp_path / 'run'}"])
    assert status(tmp_path / "run") == ("finished", 3, None)
