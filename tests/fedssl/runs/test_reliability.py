"""Reliability of results that need no labels: by hand, and in the table of ``fedssl-runs best --by``."""

import json
import shutil
from math import atanh, sqrt, tanh
from pathlib import Path

import pytest

from fedssl.runs.reliability import correlation
from tests.fedssl.runs.test_cli import command, job

__all__ = ["command"]


def test_correlation_by_hand():
    # One pair of neighbors exchanged: sum of squares of differences 2, rho = 1 - 6 * 2 / (5 * 24) = 0.9.
    found = correlation([1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.5, 0.4])
    half = 1.959963985 * sqrt((1 + 0.9**2 / 2) / 2)
    assert (found.rho, found.low, found.high) == pytest.approx((0.9, tanh(atanh(0.9) - half), tanh(atanh(0.9) + half)))


def test_there_is_none_of_few_or_equal_results():
    assert correlation([1, 2, 3, 4], [1, 2, 3, 4]) is None
    assert correlation([1, 1, 1, 1, 1], [1, 2, 3, 4, 5]) is None


def make(root: Path, values: dict[str, list[float]], linear: list[float], *overrides: str) -> None:
    for number, accuracy in enumerate(linear):
        folder = job(root / f"run{number}", f"optimizer.lr={number + 1}", *overrides, linear=accuracy)
        health = {name: column[number] for name, column in values.items()}
        lines = [{"round": 19}, {"round": 20, "health": {"global": health}}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_best_by_a_result_without_labels(tmp_path, command):
    make(tmp_path, {"effective_rank": [5, 1, 3, 2, 4], "alpha_req": [0.4, 1.1, 3, 2, 1.5]}, [0.9, 0.5, 0.7, 0.6, 0.8])
    status, out, _ = command("best", "--by", "rankme", tmp_path)
    assert status == 0
    assert [line.split()[-1][-4:] for line in out.splitlines()[1:6]] == ["run0", "run4", "run2", "run3", "run1"]
    assert "rank correlation of rankme with linear accuracy: 1.00 (95% interval 1.00 to 1.00) over 5 runs" in out
    _, out, _ = command("best", "--by", "alpha_req", tmp_path, "--json")  # the nearest to 1
    found = json.loads(out)
    assert [Path(group["runs"][0]["folder"]).name for group in found["ranked"]] == [f"run{n}" for n in (1, 4, 0, 3, 2)]
    assert "so that its ranking may be chance" in found["reliability"]


def test_copies_count_once_and_encoders_are_not_mixed(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs", {"effective_rank": [5, 1, 3, 2, 4]}, [0.9, 0.5, 0.7, 0.6, 0.8])
    shutil.copytree("runs", "backup")
    assert "over 5 runs" in command("best", "--by", "rankme", "runs", tmp_path / "runs", "backup")[1]
    ranked = json.loads(command("best", "--by", "rankme", "--seeds", "--json", "runs", tmp_path / "runs")[1])["ranked"]
    assert len(ranked) == 5
    make(tmp_path / "other", {"effective_rank": [1]}, [0.9], "encoder=resnet18")
    mixed = "how reliable rankme is here is unknown: runs with encoder=conv_small,resnet18; select one"
    assert mixed in command("best", "--by", "rankme", "runs", "other")[1]
    assert "over 5 runs" in command("best", "--by", "rankme", "encoder=conv_small", "runs", "other")[1]


def test_bad_input(tmp_path, command):
    make(tmp_path, {"effective_rank": [1, 2]}, [0.5, 0.6])
    assert "2 of these runs have rankme and linear accuracy" in command("best", "--by", "rankme", tmp_path)[1]
    assert "no finished run has recorded lidar; set evaluate_every" in command("best", "--by", "lidar", tmp_path)[2]
    assert "the metric is missing" in command("best")[2]
