"""Runs in virtual time: the same bits on every engine and after a resume, and settings that cannot be combined."""

import re
from pathlib import Path

import pytest

from fedssl.availability import LogNormalSpeed
from fedssl.config.load import load_settings
from fedssl.errors import InputError
from simulation.grid import LocalGrid
from simulation.run import run
from tests.resuming import repeat_from
from tests.runs import model_bits, read_lines, read_summary

BASE = ["num_clients=6", "clients_per_round=4", "rounds=6", "local_epochs=1", "dataset.limit=91", "encoder.width=2"]
BASE += ["threads=1", "evaluation=none", "final_evaluation=none", "collapse_images=0", "partition=iid", "batch_size=8"]
BASE += ["strategy=fedavg", "seed=3", "client_speed=lognormal", "keep_checkpoints=9", "aggregation.max_retries=9"]
DIURNAL = ["availability=diurnal", "availability.fraction=0.7", "availability.period=3", "availability.dropout=0.1"]
MODES = {
    "deadline": ["aggregation.round_deadline=0.4"],
    "over_selection": ["aggregation.over_selection=3", "clients_per_round=2", "client_speed.sigma_clients=1"],
    "stages": ["schedule=progressive", "regularizer=fur", "strategy=l_dawa"],
    "buffered": ["aggregation.buffered=true", "aggregation.min_updates=2", "client_speed.sigma_clients=1"],
}


def overrides(mode: str) -> list[str]:
    return [*BASE, *DIURNAL, *MODES[mode]]


def lines(folder: Path, name: str) -> list[dict]:
    """Return the lines without wall-clock time, memory and the length of paths, which differ between runs."""
    found = read_lines(folder / f"{name}.jsonl")
    for line in found:
        for key in ("seconds", "client_seconds", "bytes_down"):
            line.pop(key, None)
        line.get("cost", {}).pop("peak_memory", None)
    return found


def assert_equal_runs(one: Path, other: Path) -> None:
    assert model_bits(one) == model_bits(other)
    for name in ("metrics", "clients"):
        assert lines(one, name) == lines(other, name)


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(mode) / "run"
    run([*overrides(mode), "engine=local", f"output_dir={folder}"])
    return folder


def test_clients_take_the_time_of_their_bytes_and_flops(folder: Path, mode: str) -> None:
    """91 images over 6 clients: client 0 has 16 and the others have 15; the medians are those of lognormal.yaml."""
    if mode == "stages":
        pytest.skip("the size and the FLOPs of each stage differ")
    sigma = 0.5 if mode == "deadline" else 1.0
    medians = {"flops_per_second": 1e10, "upload_bytes_per_second": 1e6, "download_bytes_per_second": 4e6}
    speeds = LogNormalSpeed(num_clients=6, seed=3, **medians, sigma_clients=sigma, sigma_rounds=0.1)
    flops_per_image = lines(folder, "metrics")[0]["cost"]["flops_per_image"]
    size = int(re.search(r"(\d+) bytes of layers per model", (folder / "run.log").read_text())[1])
    rows = lines(folder, "clients")
    for row in rows:
        speed = speeds.speed(row["client"], row["round"] - row["staleness"])
        seconds = size / speed.download_bytes_per_second + size / speed.upload_bytes_per_second
        seconds += flops_per_image * (16 if row["client"] == 0 else 15) / speed.flops_per_second
        assert row["virtual_seconds"] == pytest.approx(seconds, rel=1e-3)  # there are empty records, of a few bytes
    assert len({row["virtual_seconds"] for row in rows}) == len(rows)


def test_the_clock_adds_up_the_rounds(folder: Path) -> None:
    metrics, clock = lines(folder, "metrics"), 0.0
    for line in metrics:
        clock += line["virtual_seconds"]
        assert line["virtual_time"] == pytest.approx(clock)
    assert read_summary(folder)["client"]["virtual_seconds"] == metrics[-1]["virtual_time"]
    assert "virtual time" in (folder / "run.log").read_text()


def test_some_clients_are_lost_late_or_cut_off(folder: Path, mode: str) -> None:
    """Otherwise the other tests compare nothing."""
    reasons = {reason for line in lines(folder, "metrics") for reason in line["dropped"].values()}
    assert any("offline" in reason or "lost" in reason for reason in reasons)
    if mode == "stages":
        return
    if mode == "buffered":
        assert max(row["staleness"] for row in lines(folder, "clients")) > 0
    else:
        assert "no reply in time" in reasons


@pytest.mark.heavy
def test_a_resumed_run_has_the_same_bits(folder: Path) -> None:
    assert_equal_runs(folder, repeat_from(3, folder, "keep_checkpoints=9"))


@pytest.mark.heavy
def test_another_order_of_replies_has_the_same_bits(
    folder: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = LocalGrid.pull_messages
    monkeypatch.setattr(LocalGrid, "pull_messages", lambda self, ids: pull(self, reversed(list(ids))))
    run([*overrides(mode), "engine=local", f"output_dir={tmp_path / 'run'}"])
    assert_equal_runs(folder, tmp_path / "run")


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["deadline", "buffered"], indirect=True)
def test_ray_has_the_same_bits(folder: Path, mode: str, tmp_path: Path) -> None:
    run([*overrides(mode), "engine=ray", f"output_dir={tmp_path / 'run'}"])
    assert_equal_runs(folder, tmp_path / "run")


REJECTED = {
    "no virtual time": (["client_speed=none", *DIURNAL], "availability=diurnal needs virtual time; set client_speed="),
    "no FLOPs": (["measure_resources=false"], "from the FLOPs of its training; set measure_resources=true, or client_"),
    "secure aggregation": (
        ["secure_aggregation=secagg_plus", "strategy.weighting=uniform"],
        "sends four messages per client and round, which virtual time does not model; set client_speed=none",
    ),
    "no file": (["availability=trace"], "availability=trace needs availability.file"),
    "no file of speeds": (
        ["client_speed=trace", "client_speed.file=no.csv"],
        "no.csv does not exist; choose a CSV file",
    ),
    "another group": (["availability.fraction=0.5"], "there is no setting 'availability.fraction'"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_cannot_be_combined_is_rejected(case: str, tmp_path: Path) -> None:
    settings, message = REJECTED[case]
    with pytest.raises(InputError, match=message):
        run([*BASE, *settings, f"output_dir={tmp_path / 'run'}"])


def test_a_resumed_run_keeps_its_virtual_time(folder: Path, mode: str) -> None:
    for setting in ("client_speed.sigma_rounds=0.2", "availability.fraction=0.5"):
        with pytest.raises(InputError, match="was run with .*; keep the settings, or start a new run"):
            load_settings([f"resume={folder}", "rounds=7", setting])
    if mode == "deadline":  # it decides who takes part
        with pytest.raises(InputError, match="was run with aggregation.round_deadline=0.4"):
            load_settings([f"resume={folder}", "rounds=7", "aggregation.round_deadline=0.5"])
