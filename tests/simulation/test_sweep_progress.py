"""Progress of a sweep: the lines of ended jobs, the time left, and the live table of a terminal."""

import errno
import json
import sys
from types import SimpleNamespace

import pytest

from simulation.sweep import JobWave, run_jobs
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import Job


@pytest.fixture
def clock(monkeypatch):
    """Seconds on the clock, which a test sets."""
    now = [100.0]
    monkeypatch.setattr("simulation.sweep_progress.time.monotonic", lambda: now[0])
    return now


def make_run(folder, *, status=None, knn=0.5):
    folder.mkdir()
    (folder / "run.log").touch()
    (folder / "config.yaml").write_text("rounds: 8\n")
    health = {"global": {"effective_rank": 3.0}}
    lines = [{"round": round, "evaluation": {"knn": knn}, "health": health} for round in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status is not None:
        summary = {"status": status, "reason": f"{status} after round 2 of 8", "overrides": [], "rounds": 2}
        summary |= {"final": {"federated": {"knn": knn}}}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_lines_of_ended_jobs(tmp_path, clock, capsys):
    """After the first of four jobs, 30 s: 90 s are left; after the third, 120 s: 40 s."""
    jobs = [tmp_path / str(number) for number in range(4)]
    progress = SweepProgress(jobs)
    make_run(jobs[0], status="finished", knn=0.5)
    clock[0] += 30
    progress.end(jobs[0], None, work=1)
    make_run(jobs[1], status="finished", knn=0.75)
    clock[0] += 50
    progress.end(jobs[1], None, work=1)
    make_run(jobs[2], status="failed")
    clock[0] += 40
    progress.end(jobs[2], "no images", work=1)
    assert capsys.readouterr().out.splitlines() == [
        "[job 0] finished knn 50.0%",
        "  1 of 4 jobs ended, 0 failed, about 2 min left, best knn 50.0% (job 0)",
        "[job 1] finished knn 75.0%",
        "  2 of 4 jobs ended, 0 failed, about 80 s left, best knn 75.0% (job 1)",
        "[job 2] failed: no images",
        "  3 of 4 jobs ended, 1 failed, about 40 s left, best knn 75.0% (job 1)",
    ]


def test_no_live_table_without_a_terminal(tmp_path, capsys):
    with SweepProgress([tmp_path / "0"]).live(dict):
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "Input/output error")])
def test_a_closed_terminal_does_not_end_a_sweep(tmp_path, monkeypatch, error):
    def fail(text):
        raise error

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=fail, flush=lambda: None))
    progress, ran = SweepProgress([tmp_path / "0", tmp_path / "1"]), []
    run_jobs([JobWave([Job(tmp_path / number, ()) for number in "01"])], ran.append, progress)
    assert len(ran) == 2
