"""Schedules of real processes: kill -9 of a run, of a Ray worker, of a SuperNode and of the SuperLink, and signals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.runs.jsonl import read_jsonl
from server_app.checkpoint import latest_checkpoint
from simulation.run import run as simulate
from tests.deploy.test_fleet import SMALL, partitions
from tests.devices import write_images
from tests.faults.schedules import BASE
from tests.fleet import fleet, until

PROGRAM = "from fedssl.command_line import fedssl; fedssl()"
RAY = "num_clients=4 clients_per_round=3 rounds=6 evaluate_every=0"
VARIANTS = ("strategy=fedu method=byol", "strategy=gossip clients_per_round=4", "strategy=l_dawa method=orchestra")
ENDS = ("process", "worker", "SIGINT", "SIGTERM", "SIGHUP")
MARK = "FEDSSL_FAULTS"  # environment variable of all processes of a schedule
FLEET_ENDS = ("superlink", "supernode", "serverapp")
PATIENCE = 300.0


def play_ray(number: int, folder: Path) -> str:
    """Kill a process of a run with Ray, or send it a signal, at a random moment; return what was done."""
    draw = random.Random(f"ray {number}")
    variant, end = VARIANTS[number % len(VARIANTS)], ENDS[number % len(ENDS)]
    rounds, pause = draw.randrange(0, 5), draw.random()
    overrides = [*BASE.split(), *RAY.split(), *variant.split()]
    simulate([*overrides, f"output_dir={folder / 'expected'}"])
    mark, run = uuid.uuid4().hex, folder / "run"
    process = _start([*overrides, "engine=ray", "engine.client_cpus=1", f"output_dir={run}"], mark)
    _until(lambda: process.poll() is not None or _rounds(run) >= rounds, f"round {rounds}")
    time.sleep(pause)
    if end == "worker":
        workers = [pid for pid in _marked(mark) if _command(pid).startswith("ray::ClientActor")]
        if workers:
            os.kill(draw.choice(workers), signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        lines = read_jsonl(run / "metrics.jsonl")
        assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert all(line["clients"] + len(line["dropped"]) == _sampled(variant) for line in lines)
        assert sum(len(line["dropped"]) for line in lines) <= 1
    else:
        process.send_signal(signal.SIGKILL if end == "process" else signal.Signals[end])
        _, errors = process.communicate(timeout=PATIENCE)
        if process.returncode != 0 and end != "process":
            assert process.returncode == 128 + signal.Signals[end], errors
            assert errors.startswith("fedssl: stopped"), errors
    _until(lambda: not _marked(mark), "all processes have ended")
    if end != "worker":
        resumed = [f"resume={run}"] if (run / "config.yaml").exists() else [*overrides, f"output_dir={run}"]
        simulate([*resumed, "engine=local"])
        _check_equal(folder / "expected", run)
    return f"ray, {variant}: {end} after round {rounds}"


def play_fleet(number: int, folder: Path) -> str:
    """Kill a SuperNode, the SuperLink or its ServerApp during a run on three devices; return what was done."""
    draw = random.Random(f"fleet {number}")
    end, rounds, pause = FLEET_ENDS[number % len(FLEET_ENDS)], draw.randrange(1, 3), 2 * draw.random()
    names = ("a", "b", "c")
    images = {name: write_images(folder / "images" / name, 9 + index, seed=index) for index, name in enumerate(names)}
    overrides = [*SMALL, "strategy=fedu", "method=byol", "rounds=4"]
    own = [f"dataset.path={folder / 'images'}", "dataset.folders=owner", "partition=natural", "num_clients=3"]
    simulate([*overrides, *own, f"output_dir={folder / 'expected'}"])
    numbers, run = partitions(folder / "expected"), folder / "run"
    start = {}
    for name in names:
        start[name] = {"data_path": images[name], "client_name": name}
        start[name] |= {"state_path": folder / name, "partition_id": numbers[name]}
    with fleet(*names) as running:
        for name in names:
            running.start_node(name, **start[name])
        running.wait_for_nodes(3)
        process = running.submit(*overrides, "num_clients=3", f"output_dir={run}")
        until(lambda: _rounds(run) >= rounds, f"round {rounds}", process)
        time.sleep(pause)
        if end == "supernode":
            running.kill("b")
            running.start_node("b", **start["b"])
        elif end == "superlink":
            running.kill("superlink")
            running.start_superlink()
        else:
            for pid in running.working("superlink"):
                os.kill(pid, signal.SIGKILL)
        output = process.communicate(timeout=PATIENCE)[0]
        if end == "supernode":  # the device is dropped, or takes part again
            assert process.returncode == 0, output
        elif process.returncode:
            assert process.returncode == 1, output
            running.wait_for_nodes(3)
            status, output = running.run(f"resume={run}")
            assert status == 0, output
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    if end == "supernode":
        assert all(line["clients"] + len(line["dropped"]) <= 3 for line in lines)
    else:
        _check_equal(folder / "expected", run)
    return f"fleet: {end} killed after round {rounds}"


def _start(overrides: list[str], mark: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *overrides],
        env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C.
        preexec_fn=lambda: [signal.signal(name, signal.SIG_DFL) for name in (signal.SIGINT, signal.SIGHUP)],
        start_new_session=True,
    )


def _sampled(variant: str) -> int:
    return 4 if "gossip" in variant else 3


def _rounds(run: Path) -> int:
    with suppress(OSError):
        return (run / "metrics.jsonl").read_text().count("\n")
    return 0


def _marked(mark: str) -> list[int]:
    """Return the processes of a schedule."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _until(true: Callable[[], Any], what: str) -> None:
    last = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < last, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.05)


def _check_equal(expected: Path, found: Path) -> None:
    one, other = (latest_checkpoint(folder / "checkpoints").models for folder in (expected, found))
    assert one.keys() == other.keys()
    for name in one:
        assert all(np.array_equal(one[name].layers[layer], other[name].layers[layer]) for layer in one[name].layers)
    rounds = [json.loads(line)["round"] for line in (found / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, len(rounds) + 1))
