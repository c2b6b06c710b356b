"""What the live view knows of runs, in every state and with damage."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedssl.watch.live_run import LiveRun, thin
from fedssl.watch.watcher import Watcher
from simulation.sweep import acquire_lock
from tests.fedssl.report.test_html_page import HOSTILE, job
from tests.runs import change_summary, write_lines


def read(run: LiveRun) -> dict[str, Any]:
    run.update()
    details = run.details()
    json.dumps(details, allow_nan=False)  # what a browser can parse
    return details


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two rounds that is finished: loss 1 and 0.5, accuracies 25% and 50%, 12 bytes a round."""
    return job(tmp_path / "a", "strategy=l_dawa")


def test_values_of_a_finished_run(folder: Path):
    details = read(LiveRun(folder))
    assert (details["state"], details["done"], details["rounds"]) == ("finished", 2, 2)
    assert details["values"]["loss"] == [[1, 1], [2, 0.5]]
    assert details["values"]["bytes"] == [[1, 12], [2, 24]]
    assert details["values"]["dropped"] == details["values"]["late"] == [[1, 0], [2, 0]]
    assert details["evaluation"] == {"knn": [[1, 25], [2, 50]]}
    assert details["units"] == {"knn": "%"}
    assert details["command"] == "fedssl strategy=l_dawa"
    assert details["problems"] == []


def test_a_run_is_followed_through_its_states(folder: Path, monkeypatch: pytest.MonkeyPatch):
    run = LiveRun(folder)
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").unlink()
    (folder / "config.yaml").write_text('{"rounds": 9, "seed": 0}')
    with acquire_lock(folder):
        assert read(run)["state"] == "running"
        write_lines(
            folder / "metrics.jsonl", [{"round": 3, "seconds": 4, "clients": 1, "late": 2, "dropped": {"7": HOSTILE}}]
        )
        details = read(run)
        assert details["values"]["late"] == [[1, 0], [2, 0], [3, 2]]
        assert details["values"]["dropped"][-1] == [3, 1]
        assert details["dropped"] == [[3, {"7": HOSTILE.replace("\x1b", " ")}]]
        assert details["left"] == 12  # 6 rounds at (1 + 1 + 4) / 3 seconds
    assert read(run)["state"] == "running elsewhere, or killed"  # written now, and no lock of this machine
    monkeypatch.setattr("fedssl.watch.live_run.RECENT", -1)
    assert read(run)["state"] == "ended from outside"
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 1, "clients": 2}) + "\n")  # resumed after round 1
    details = read(run)
    assert details["done"] == 1
    assert details["evaluation"] == {}
    (folder / "summary.json").write_text(summary.replace("finished", "interrupted"))
    assert read(run)["state"] == "interrupted"


def test_a_run_has_the_baselines_of_an_equal_task(folder: Path):
    final = {"federated": {"knn": 0.5}, "untrained": {"knn": 0.2, "linear": 0.1}, "pixels": {"knn": 0.4}}
    change_summary(folder, final=final)
    settings = json.loads((folder / "config.yaml").read_text())
    changes = {"equal": {"rounds": 9}, "other_seed": {"seed": 1}, "other_data": {"dataset": {"limit": 5}}}
    for name, changed in changes.items():
        other = job(folder.parent / name)
        (other / "summary.json").unlink()
        (other / "config.yaml").write_text(json.dumps({**settings, **changed}))
    watcher = Watcher([folder.parent])
    details = {run["name"]: watcher.details(run["id"]) for run in watcher.overview()["runs"]}
    assert {name: of["note"].partition(",")[0] for name, of in details.items()} == {
        "a": "",
        "equal": "",
        "other_seed": "no line of untrained and pixels",  # a seed draws labels
        "other_data": "no line of untrained and pixels",
    }
    found = {name: of["baselines"] for name, of in details.items()}
    both = {"untrained": {"knn": 20}, "pixels": {"knn": 40}}  # of the results that the rounds have
    nothing = {"untrained": {}, "pixels": {}}
    assert found == {"a": both, "equal": both, "other_seed": nothing, "other_data": nothing}


def test_baselines_of_another_protocol_are_not_shown(folder: Path):
    """Their results have the same name as those of the rounds."""
    change_summary(folder, final={"federated": {"knn": 0.5}, "untrained": {"knn": 0.2}})
    settings = json.loads((folder / "config.yaml").read_text())
    for k, expected in ((1, {"knn": 20}), (40, {})):
        (folder / "config.yaml").write_text(
            json.dumps({**settings, "evaluation": {"k": 1}, "final_evaluation": {"k": k}})
        )
        watcher = Watcher([folder])
        (run,) = watcher.overview()["runs"]
        details = watcher.details(run["id"])
        assert details["baselines"].get("untrained", {}) == expected
        assert bool(details["note"]) == bool(expected)  # the line of pixels may follow


def test_layer_cosines_are_means_over_clients(folder: Path):
    run = LiveRun(folder)
    assert read(run)["layers"] == {}
    rows = [(1, 0.5, 1.0), (1, 0.7, 0.0), (2, 0.9, 0.2)]
    write_lines(folder / "clients.jsonl", ({"round": n, "client": 0, "cosine": {"a": a, "b": b}} for n, a, b in rows))
    assert read(run)["layers"] == {"a": [[1, 0.6], [2, 0.9]], "b": [[1, 0.5], [2, 0.2]]}
    write_lines(folder / "clients.jsonl", [{"round": 2, "client": 1, "cosine": {"a": 0.7, "b": None}}])
    assert read(run)["layers"] == {"a": [[1, 0.6], [2, 0.8]], "b": [[1, 0.5], [2, 0.2]]}


def test_problems_are_collapse_damage_and_losses_without_a_value(folder: Path):
    health = {"global": {"effective_rank": 1.2, "covariance_rank": 9.0, "spread": 0.01}, "clients": {"spread": 0.5}}
    write_lines(folder / "metrics.jsonl", [{"round": 3, "clients": 2, "loss": math.nan, "health": health}])
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write("damaged\n")
    details = read(LiveRun(folder))
    assert details["problems"] == [
        "metrics.jsonl: unreadable lines: 1",
        "the representation has collapsed in round 3 "
        "(the global model: effective rank 1.2, below 1.5; the global model: spread 0.01, below 0.05)",
        "no finite loss in rounds: 1, the last one in round 3",
    ]
    assert details["values"]["rank_global"] == [[3, 1.2]]
    (folder / "config.yaml").write_text("a: [")
    assert "config.yaml cannot be used" in read(LiveRun(folder))["problems"][0]


@pytest.mark.parametrize(
    "line",
    [
        {"round": 1e400},
        {"round": "1"},
        {"round": 3, "loss": "x", "evaluation": [1], "units": 1, "health": {"global": 1}, "dropped": [1]},
        {"round": 3, "evaluation": {"knn": {}}, "units": {"knn": {}}, "clients": 1e300, "seconds": True},
    ],
)
def test_lines_of_other_programs_are_no_error(folder: Path, line: dict[str, Any]):
    write_lines(folder / "metrics.jsonl", [line])
    write_lines(folder / "clients.jsonl", [{**line, "cosine": line.get("evaluation")}])
    assert read(LiveRun(folder))["values"]["loss"] == [[1, 1], [2, 0.5]]


def test_thinned_runs_keep_their_peaks_and_the_last_round():
    points = {round: math.sin(round) for round in range(1, 10_001)} | {4321: 9.0, 8765: -9.0, 10_000: 0.5}
    found = thin(points)
    assert 300 < len(found) <= 400
    assert [4321, 9] in found
    assert [8765, -9] in found
    assert found[-1] == [10_000, 0.5]
    assert found == sorted(found)
    assert max(b[0] - a[0] for a, b in itertools.pairwise(found)) <= 2 * 51  # of two parts of 10,000 / 199.5 rounds
    assert thin({3: 0.5, 1: 0.123456789}, scale=100) == [[1, 12.3457], [3, 50]]
    assert len(thin({round: 1.0 * round for round in range(400)})) == 400
    assert thin({}) == []


def test_a_watcher_finds_runs_that_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedssl.watch.watcher._PAUSE", 0)
    monkeypatch.setattr("fedssl.watch.watcher._SEARCH_SHARE", 1e9)
    folders = [tmp_path / "runs", tmp_path / "multirun"]
    watcher = Watcher(folders)
    assert watcher.overview() == {"runs": [], "more": 0, "waiting": [*map(str, folders)]}
    first = job(tmp_path / "runs" / "2026-01-01_10-00-00", "strategy=l_dawa")
    job(tmp_path / "multirun" / "2026-01-02_10-00-00" / "0", "strategy=l_dawa")
    found = watcher.overview()
    assert found["waiting"] == []
    assert [run["date"] for run in found["runs"]] == ["2026-01-02 10:00:00", "2026-01-01 10:00:00"]  # newest first
    assert found["runs"][0]["curve"] == {"name": "knn", "points": [[1, 25], [2, 50]]}
    old = found["runs"][1]["id"]
    assert watcher.details(old)["name"] == str(first)
    with acquire_lock(first):
        assert watcher.overview()["runs"][0]["id"] == old  # those that run come first
    for file in first.iterdir():
        file.unlink()
    first.rmdir()
    assert watcher.details(old) is None
    assert watcher.details("../../etc/passwd") is None
    assert Watcher([tmp_path]).overview()["runs"][0]["name"] == "multirun/2026-01-02_10-00-00/0"
