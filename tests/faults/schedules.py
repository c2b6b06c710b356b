"""Seeded schedules of faults during a run, and what must hold afterwards.

A schedule disturbs a small run up to three times: the process is killed, the power or the disk fails, an fsync fails,
or the clock jumps. After each disturbance a file may be damaged, and the run is resumed. Messages have faults too.

- Without damage the last resumption ends with the model, the lines and the files of the undisturbed run.
- With damage it does, or it is rejected with one sentence.
- A full disk and a failed fsync end with one sentence.
- A model is finite, and a round has each client once.
- Nothing is written outside the run folder, no partial file is left, and the server does not wait for ever.
"""

import json
import random
import shlex
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app import state_store
from fedssl.errors import InputError, RunError
from fedssl.runs.manifest import CLIENT_MODELS, JSONL_FILES
from fedssl.safe_io import read_tensors
from server_app.callbacks import order
from server_app.checkpoint import latest_checkpoint
from simulation import grid
from simulation.run import run
from tests.faults.disk import DAMAGES, DISK_FULL, FAILED_WRITE, STATES, Disk, Killed, damage, remove
from tests.faults.messages import FaultyGrid

BASE = "num_clients=3 rounds=3 local_epochs=1 dataset.limit=36 dataset.test_limit=12 encoder.width=2 threads=1"
BASE += (
    " engine=local"
    " partition=iid evaluate_every=1 final_evaluation=knn collapse_images=0 measure_resources=false augmentation=none"
)
BASE += " batch_size=8"
UNIFORM = "strategy=fedavg strategy.weighting=uniform"
VARIANTS = (
    "strategy=fedu method=byol collapse_images=6",
    "strategy=featarc strategy.num_images=4",
    "strategy=gossip collapse_images=6",
    "strategy=per_ssl",
    "strategy=clustered strategy.num_images=4",
    "strategy=clustered strategy.assign_by=update_cosine",
    "strategy=fedema method=byol server_optimizer=fedadam",
    "strategy=local_only",
    "strategy=l_dawa_fedu method=byol keep_checkpoints=1",
    "strategy=fedbn",
    "strategy=euc",
    "strategy=l_dawa method=orchestra",
    "strategy=fedavg method=fedca",
    "rounds=4 schedule=layer_wise calibration=auxiliary calibration.share=0.2",
    "strategy=l_dawa wire_dtype=int8 snapshot_every=1 collapse_images=6",
    f"{UNIFORM} privacy=central encoder.norm=group method.projector.batch_norm=false",
    "strategy=fedavg method=byol server_optimizer=fedavgm checkpoint_every=2",
    "strategy=fedprox aggregation.max_norm_ratio=10 aggregation.buffered=true aggregation.max_retries=9",
)
VARYING = {"seconds", "client_seconds", "bytes_up", "bytes_down"}  # bytes: the name of the folder is sent


@dataclass(frozen=True)
class Disturbance:
    kind: str  # kill, power failure, full disk, failed fsync, failed write, clock
    at: float  # fraction of the file operations of an undisturbed run
    damage: str  # "": none
    file: int


@dataclass(frozen=True)
class Schedule:
    number: int
    variant: str
    messages: int  # seed of the faults of messages; 0: none
    disturbances: tuple[Disturbance, ...]

    def __str__(self) -> str:
        steps = [
            f"{d.kind} at {d.at:.2f}{f', {d.damage} file {d.file}' if d.damage else ''}" for d in self.disturbances
        ]
        return f"schedule {self.number}: {self.variant}; messages {self.messages}; {'; '.join(steps)}"


def make_schedule(number: int, *, seed: int = 0) -> Schedule:
    draw = random.Random(f"{seed} {number}")
    kinds = ("kill", "kill", "power failure", "power failure", "full disk", "failed fsync", "failed write", "clock")
    disturbances = tuple(
        Disturbance(
            draw.choice(kinds),
            draw.random(),
            draw.choice(DAMAGES) if draw.random() < 0.4 else "",
            draw.randrange(2**31),
        )
        for _ in range(draw.randrange(1, 4))
    )
    return Schedule(number, VARIANTS[number % len(VARIANTS)], draw.choice((0, 1)), disturbances)


class _LazyFuture(Future[Any]):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(timeout)

    def run(self) -> None:
        if not self.done():
            try:
                self.set_result(self._call())
            except BaseException as error:
                self.set_exception(error)


class LazyExecutor:
    """Runs a task as late as possible: when its result is requested."""

    def __init__(self, **options: Any) -> None:
        self._futures: list[_LazyFuture] = []

    def submit(self, function: Any, *args: Any, **options: Any) -> _LazyFuture:
        self._futures.append(_LazyFuture(lambda: function(*args, **options)))
        return self._futures[-1]

    def shutdown(self) -> None:
        for future in self._futures:
            future.run()


class Clock:
    """``time.time`` that jumps by up to two days, forth and back, after ``jump``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._time, self._random, self.jumps = time.time, random.Random(0), False
        patch.setattr(time, "time", self.now)

    def now(self) -> float:
        return self._time() + (self._random.uniform(-2e5, 2e5) if self.jumps else 0)


@dataclass(frozen=True)
class Outcome:
    model: dict[str, bytes]
    states: dict[str, bytes]
    lines: list[dict[str, Any]]
    files: list[str]


def outcome(folder: Path) -> Outcome:
    """Return what two runs must have in common."""
    state = latest_checkpoint(folder / "checkpoints")
    models = {
        f"{name} {layer}": array.tobytes()
        for name, model in state.models.items()
        for layer, array in model.layers.items()
    }
    assert all(np.isfinite(array).all() for model in state.models.values() for array in model.layers.values())
    in_files = {path.parent: path for path in sorted(folder.glob(f"{CLIENT_MODELS}/*/*/round-*.pt"))}
    for parent, path in in_files.items():
        layers = read_tensors(path)["layers"]
        models |= {f"{parent.name} {layer}": tensor.numpy().tobytes() for layer, tensor in layers.items()}
    newest = {path.parent: path for path in sorted(folder.rglob(f"*{STATES}")) if path.is_file()}
    states = {parent.relative_to(folder).as_posix(): path.read_bytes() for parent, path in newest.items()}
    lines = [
        {key: value for key, value in json.loads(line).items() if key not in VARYING}
        for name in JSONL_FILES
        if (folder / name).exists()
        for line in (folder / name).read_text().splitlines()
    ]
    participations = [(line["round"], line["client"]) for line in lines if "client" in line and "num_examples" in line]
    assert len(participations) == len(set(participations))
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    versions = ("checkpoints/", "clients/", f"{CLIENT_MODELS}/")
    return Outcome(models, states, lines, sorted(file for file in files if not file.startswith(versions)))


class Simulator:
    """Runs of one schedule in this process, with a disk and a clock that fail."""

    def __init__(self, schedule: Schedule, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.schedule, self.folder = schedule, folder
        self.ended: str | None = ""
        self.power_failed = False
        patch.setattr(state_store, "ThreadPoolExecutor", LazyExecutor)
        patch.setattr(order, "can_evaluate_in_background", lambda components, client_cores: False)
        patch.setattr(grid, "LocalGrid", FaultyGrid if schedule.messages else grid.LocalGrid)
        patch.setattr(FaultyGrid, "seed", schedule.messages)
        # A client of gossip or local_only that is dropped has no model, and layer-wise training needs all of them.
        patch.setattr(FaultyGrid, "drops", not schedule.variant.startswith("rounds"))
        patch.setattr(time, "sleep", lambda seconds: None)  # virtual time: `FaultyGrid` counts the polls
        self.disk, self.clock = Disk(folder, patch), Clock(patch)

    @property
    def has_finished(self) -> bool:
        """Return whether the last run finished, and the power did not fail afterwards."""
        return self.ended is None and not self.power_failed

    def run(self) -> str | None:
        """Start or resume the run. Return the sentence that ended it, "killed", or None if it finished."""
        started = (self.folder / "config.yaml").exists()
        if not started:
            remove(self.folder)
        overrides = [*shlex.split(BASE), *shlex.split(self.schedule.variant), f"output_dir={self.folder}"]
        try:
            run([f"resume={self.folder}"] if started else overrides)
        except Killed:
            return "killed"
        except (InputError, RunError) as error:
            sentence = str(error)
        else:
            return None
        assert "\n" not in sentence
        return sentence


@cache
def undisturbed(variant: str, messages: int, base: Path) -> tuple[Outcome, int]:
    """Return the outcome of a run without faults of disk and process, and the number of its file operations."""
    folder = base / f"{VARIANTS.index(variant)}-{messages}"
    with pytest.MonkeyPatch.context() as patch:
        simulator = Simulator(Schedule(-1, variant, messages, ()), folder, patch)
        simulator.disk.begin(0)
        assert simulator.run() is None
    return outcome(folder), simulator.disk.count


def play(schedule: Schedule, folder: Path, *, base: Path) -> str:
    """Play a schedule; return "equal", or the sentence that rejected a damaged folder."""
    expected, operations = undisturbed(schedule.variant, schedule.messages, base)
    around = sorted(folder.parent.iterdir())
    damaged: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        simulator = Simulator(schedule, folder, patch)
        for disturbance in schedule.disturbances:
            _disturb(simulator, disturbance, operations, damaged)
            if simulator.has_finished and not damaged:
                assert outcome(folder) == expected, "a run finished with other results"
        simulator.clock.jumps = False
        simulator.disk.begin(0)
        ended = simulator.run()
    assert sorted(folder.parent.iterdir()) in (around, sorted([*around, folder])), "files outside the run folder"
    if ended is not None:
        assert damaged, f"the resumed run ended with: {ended}"
        return ended
    assert not list(folder.rglob("*.partial"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    found = outcome(folder)
    assert found.lines == expected.lines
    assert found.model == expected.model
    assert found.states == expected.states
    assert found.files == expected.files, set(found.files) ^ set(expected.files)
    return "equal"


def _disturb(simulator: Simulator, disturbance: Disturbance, operations: int, damaged: list[Path]) -> None:
    at = 1 + int(disturbance.at * operations)
    errors = {"full disk": DISK_FULL, "failed fsync": FAILED_WRITE, "failed write": FAILED_WRITE}
    simulator.clock.jumps = disturbance.kind == "clock"
    only = {"failed fsync": "fsync", "failed write": "append"}.get(disturbance.kind, "")
    if only:
        once = only == "append"
        at = 1 + int(disturbance.at * (9 if once else operations / 4))  # three files in three rounds
        simulator.disk.begin(at, error=FAILED_WRITE, once=once, only=only)
    else:
        simulator.disk.begin(0 if disturbance.kind == "clock" else at, error=errors.get(disturbance.kind))
    simulator.power_failed = False
    ended = simulator.ended = simulator.run()
    if ended not in (None, "killed") and not damaged:
        assert disturbance.kind in errors, f"the run ended with: {ended}"
        assert simulator.disk.has_failed, f"the run ended with: {ended}"
    if disturbance.kind == "power failure" and simulator.disk.has_failed:
        simulator.disk.lose_unflushed()
        simulator.power_failed = True
    simulator.disk.begin(0)
    if disturbance.damage and ended is not None and (simulator.folder / "checkpoints").is_dir():
        damaged.append(damage(simulator.folder, disturbance.damage, disturbance.file))
