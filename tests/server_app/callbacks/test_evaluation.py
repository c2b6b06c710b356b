"""The results of a finished run."""

from pathlib import Path

import pytest

from fedssl.runs import jsonl
from fedssl.runs.run import read_run
from simulation.run import run
from tests.federation import TINY


def test_a_run_with_too_many_lines_for_figures_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINES_BYTES", 3000)
    words = [
        "rounds=2",
        "num_clients=6",
        "evaluate_personalized=true",
        "final_evaluation=knn",
        "dataset.limit=200",
        "engine=local",
    ]
    run([*TINY, *words, f"output_dir={tmp_path / 'run'}"])
    monkeypatch.undo()
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"no figures, or not all: {tmp_path / 'run' / 'clients.jsonl'} cannot be used" in log
    assert read_run(tmp_path / "run").finished
    assert (tmp_path / "run" / "personalized.json").exists()
