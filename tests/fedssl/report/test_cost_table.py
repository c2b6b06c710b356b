"""The cost table from hand-made run folders."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fedssl.config.overrides import CONF
from fedssl.errors import InputError
from fedssl.report.cost_table import cost_table
from fedssl.runs.costs import CostTotals, sum_costs
from fedssl.runs.run import read_run
from tests.runs import write_lines, write_run

GIB = 2**30


def line(*, memory: int = 0, flops: float = 0, seconds: float = 1, clients: int = 2, **more: Any) -> dict[str, Any]:
    """A round; ``memory=0``: nothing was measured."""
    cost = {"cost": {"peak_memory": memory, "flops": flops}} if memory else {}
    return {"round": 1, "seconds": seconds, "clients": clients, "bytes_down": 8, "bytes_up": 4, **cost, **more}


def job(folder: Path, overrides: str, *lines: dict[str, Any], status: str = "finished") -> Path:
    write_run(folder, overrides.split(), status=status, reason="it was stopped", final={})
    write_lines(folder / "metrics.jsonl", (line | {"round": round} for round, line in enumerate(lines, start=1)))
    schedule = dict(word.split("=") for word in overrides.split()).get("schedule", "end_to_end")
    OmegaConf.save({"schedule": OmegaConf.load(CONF / "schedule" / f"{schedule}.yaml")}, folder / "config.yaml")
    (folder / "choices.yaml").write_text(json.dumps({"schedule": schedule}))  # JSON is YAML
    return folder


def table_of(*folders: Path):
    return cost_table([read_run(folder) for folder in folders])


def test_totals_are_those_of_a_constant_participant():
    rounds = [line(memory=100, flops=7, seconds=3, clients=2, client_seconds=1.5)]
    rounds += [line(memory=80, flops=5, seconds=4, clients=4, client_seconds=0.5)]
    assert sum_costs(rounds) == CostTotals(
        memory=100, flops=12, bytes_down=8 / 2 + 8 / 4, bytes_up=4 / 2 + 4 / 4, seconds=2.0, round_seconds=7
    )
    assert sum_costs(rounds).communication == 9


def test_values_missing_in_rounds_are_missing_in_totals():
    known, unknown = line(memory=1, flops=1, client_seconds=1.0), line(client_seconds=None)
    found = sum_costs([known, unknown])
    assert (found.memory, found.flops, found.seconds) == (None, None, None)
    assert (found.bytes_down, found.round_seconds) == (8, 2)
    assert sum_costs([]).flops is None


def test_costs_are_relative_to_end_to_end_training(tmp_path: Path):
    overrides = "strategy=l_dawa schedule=layer_wise"
    layer_wise = job(tmp_path / "0", overrides, line(memory=GIB, flops=2.5e12, seconds=2))
    whole = job(tmp_path / "1", "strategy=fedavg", line(memory=4 * GIB, flops=1e13, seconds=8, bytes_down=16))
    header, *body = [re.split(r" {2,}", row) for row in table_of(layer_wise, whole).text().split("\n")]
    costs = ["peak memory", "FLOPs", "bytes down", "bytes up", "down + up", "seconds"]
    assert header == ["strategy", "schedule", *costs, "runs"]
    of_layer_wise = "l_dawa, layer_wise, 1 GiB (0.25x), 2.5e+12 (0.25x), 4 B (0.50x), 2 B (1.00x), 6 B (0.60x)"
    of_whole = "fedavg, end_to_end, 4 GiB (1.00x), 1e+13 (1.00x), 8 B (1.00x), 2 B (1.00x), 10 B (1.00x)"
    assert [", ".join(row) for row in body] == [f"{of_layer_wise}, 2.0 (0.25x), 1", f"{of_whole}, 8.0 (1.00x), 1"]


def test_seeds_of_finished_runs_make_one_row(tmp_path: Path):
    seconds = {f"rounds=1 seed={seed}": line(memory=GIB, flops=1e9, seconds=seed) for seed in (1, 2, 3)}
    folders = [job(tmp_path / words[-1], words, one) for words, one in seconds.items()]
    stopped = job(tmp_path / "9", "rounds=1 schedule=progressive", line(memory=GIB), status="failed")
    (row,) = csv.DictReader(table_of(*folders, stopped).csv().splitlines())
    assert (row["runs"], float(row["seconds"]), float(row["flops"])) == ("3", 2, 1e9)
    assert next(iter(row)) == "memory"  # no setting varies
    assert table_of(stopped).rows == []
    assert table_of(job(tmp_path / "without", "rounds=1")).rows == []


def test_lines_of_a_round_that_is_repeated_are_rejected(tmp_path: Path):
    folder = job(tmp_path / "0", "rounds=2", line(), line())
    write_lines(folder / "metrics.jsonl", [line(clients=3) | {"round": 2}])
    with pytest.raises(InputError, match=r"metrics.jsonl cannot be used \(line 3 has round 2 after 2\)"):
        table_of(folder)
    (folder / "metrics.jsonl").write_text(json.dumps(line() | {"bytes_up": -1}) + "\n")
    with pytest.raises(InputError, match="bytes_up in line 1 has a value that no run writes there"):
        table_of(folder)
