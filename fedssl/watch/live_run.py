"""Values of a run for the live view, from files that may be incomplete, damaged or of another program.

JSON lines are read while they are written: only what was appended, and everything again after a resumption.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import IO, Any

from fedssl.errors import InputError, sanitize
from fedssl.evaluation.scores import COLLAPSE_THRESHOLDS, IN_PERCENT, as_scores
from fedssl.runs.groups import evaluates_alike
from fedssl.runs.jsonl import finite_number
from fedssl.runs.run import Run, is_locked, read_run
from fedssl.safe_io import open_regular_file

MAX_POINTS = 400  # of a line in a chart
MAX_LAYER_POINTS = 100
RECENT = 60  # seconds since the last write of a run that another machine may work on
_LOG_BYTES, _LOG_LINES = 2**14, 15
_SETTINGS = ("summary.json", "config.yaml", "overrides.yaml", "choices.yaml")
# Values of a line of ``metrics.jsonl`` that are drawn.
_NUMBERS = ("loss", "model_cosine", "layer_cosine", "clients", "late", "seconds", "bytes_up", "bytes_down")
# Kinds of baselines, with the settings on which they depend.
BASELINES = {
    "untrained": ("dataset", "final_evaluation", "encoder", "method", "tuning", "seed"),
    "pixels": ("dataset", "final_evaluation", "seed"),
}
_WHOSE = {"global": "the global model", "clients": "the clients, on average"}

Points = dict[int, float]  # by round
CHUNK = 2**24  # bytes at a time
MAX_BYTES = 2**25  # of a file that has been written before; earlier lines are not read
_MARK = 64  # bytes before the position by which another content is detected


class LiveRun:
    """A run folder that is read again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._layers = Tail(folder / "metrics.jsonl", max_bytes=2**30), LayerCosines(folder)
        self._stamps: object = None
        self._run: Run | None = None
        self.problem = ""  # why the settings cannot be read
        self._clear()

    def _clear(self) -> None:
        self.values: dict[str, Points] = defaultdict(dict)
        self.evaluation: dict[str, Points] = defaultdict(dict)
        self.units: dict[str, str] = {}
        self.dropped: dict[int, dict[str, str]] = {}
        self.collapsed: dict[int, str] = {}

    def update(self) -> None:
        """Read what is new, apart from the lines of clients."""
        self._read_settings()
        void, lines = self._metrics.read()
        if void:
            self._clear()
        for line in lines:
            if isinstance(line.get("round"), int):
                self._add(line["round"], line)

    def _read_settings(self) -> None:
        found = [_stat(self.folder / name) for name in _SETTINGS]
        stamps = [status and (status.st_mtime_ns, status.st_size) for status in found]
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._run, self.problem = read_run(self.folder), ""
            except (InputError, OSError) as error:
                self.problem = sanitize(error)
        if self._run is not None:
            self._run = replace(self._run, running=is_locked(self.folder))

    def _add(self, round: int, line: Mapping[str, Any]) -> None:
        for name in _NUMBERS:
            if finite_number(line.get(name)):
                self.values[name][round] = float(line[name])
        dropped = line.get("dropped")
        self.values["dropped"][round] = float(len(dropped)) if isinstance(dropped, dict) else 0.0
        self.values["late"].setdefault(round, 0.0)  # written if there are any
        if isinstance(dropped, dict) and dropped:
            self.dropped[round] = {sanitize(client): sanitize(reason)[:200] for client, reason in dropped.items()}
        units = line.get("units")
        units = {key: sanitize(unit) for key, unit in units.items()} if isinstance(units, dict) else {}
        for name, score in as_scores(_numbers(line.get("evaluation")), units).items():
            self.evaluation[name][round] = score.value
            self.units[name] = score.unit
        health = line.get("health")
        self._add_health(round, health if isinstance(health, dict) else {})

    def _add_health(self, round: int, health: Mapping[str, Any]) -> None:
        found = []
        for whose in _WHOSE:
            measured = _numbers(health.get(whose))
            if "effective_rank" in measured:
                self.values[f"rank_{whose}"][round] = measured["effective_rank"]
            found += [
                f"{_WHOSE[whose]}: {name.replace('_', ' ')} {measured[name]:.3g}, below {limit:g}"
                for name, limit in COLLAPSE_THRESHOLDS.items()
                if measured.get(name, limit) < limit
            ]
        if found:
            self.collapsed[round] = "; ".join(found)

    @property
    def rounds_done(self) -> int:
        return max(self.values["clients"] or self.values["seconds"] or [0])

    @property
    def rounds(self) -> int | None:
        """Return the number of all rounds; None if it is unknown."""
        total = self._run.value("rounds") if self._run else ""
        return int(total) if total.isdecimal() else None

    @property
    def age(self) -> float | None:
        """Return the seconds since the last write, by the clock of this machine; None before the first."""
        times = [status.st_mtime for name in ("run.log", "metrics.jsonl") if (status := _stat(self.folder / name))]
        return max(0.0, time.time() - max(times)) if times else None

    @property
    def state(self) -> str:
        if self._run is None:
            return "damaged" if self.problem else "starts"
        ended = self._run.summary is None and not self._run.running
        if ended and self.age is not None and self.age < RECENT:
            return "running elsewhere, or killed"
        return self._run.state

    def overview(self, *, curve: bool) -> dict[str, Any]:
        """Return the values of a row; with ``curve`` the first result over rounds, else the loss."""
        name, points = next(iter(self.evaluation.items()), ("loss", self.values["loss"]))
        scale, losses = self._scale(name), self.values["loss"]
        return {
            "state": self.state,
            "done": self.rounds_done,
            "rounds": self.rounds,
            "left": self._seconds_left(),
            "age": self.age,
            "date": self._run.date if self._run else "",
            "loss": losses[max(losses)] if losses else None,
            "results": self._results(),
            "warnings": len(self.collapsed) + bool(self.problem) + bool(self._metrics.unreadable),
            "curve": {"name": sanitize(name), "points": thin(points, 100, scale=scale)} if curve else None,
        }

    def _results(self) -> dict[str, float]:
        """Return the last results, those at the end if there are any."""
        last = {name: points[max(points)] * self._scale(name) for name, points in self.evaluation.items()}
        final = self._run.results if self._run else {}
        last |= {name: score.shown for name, score in final.items()}
        return {sanitize(name): float(f"{value:.6g}") for name, value in last.items()}

    def _scale(self, name: str) -> float:
        """Return 100 for results that are shown in percent, else 1."""
        return 100.0 if self.units.get(name) in IN_PERCENT else 1.0

    def _seconds_left(self) -> float | None:
        seconds = [*self.values["seconds"].values()][-5:]
        if self._run is None or not self._run.running or self.rounds is None or not seconds:
            return None
        return mean(seconds) * (self.rounds - self.rounds_done)

    def details(self) -> dict[str, Any]:
        """Return everything that the view of one run shows."""
        run = self._run
        sent = 0.0
        cumulated = {}
        for round, up in sorted(self.values["bytes_up"].items()):
            sent += up + self.values["bytes_down"].get(round, 0.0)
            cumulated[round] = sent
        return {
            **self.overview(curve=False),
            "command": sanitize(run.command) if run else "",
            "reason": run.failure_reason if run and run.summary and not run.finished else "",
            "values": {name: thin(points) for name, points in {**self.values, "bytes": cumulated}.items()},
            "evaluation": {sanitize(key): thin(of, scale=self._scale(key)) for key, of in self.evaluation.items()},
            "units": {sanitize(key): "%" if self._scale(key) == 100 else self.units[key] for key in self.evaluation},
            **self._layers.read(),
            "problems": [*self._problems()],
            "dropped": [[round, self.dropped[round]] for round in sorted(self.dropped)[-5:]],
            "log": self._log(),
        }

    def baselines(self, kind: str) -> dict[str, float]:
        """Return the results of the ``"untrained"`` encoder or of raw ``"pixels"``; none before the run has ended."""
        scores = self._run.results_of(kind) if self._run else {}
        return {name: score.shown for name, score in scores.items()}

    @property
    def has_baselines(self) -> bool:
        """Return whether the baselines, which the final evaluation measures, are comparable with the rounds."""
        return self._run is None or evaluates_alike(self._run)

    def baseline_task(self, kind: str) -> str | None:
        """Return the settings on which a baseline depends, as text; None if they are unknown."""
        settings = self._run.settings if self._run else None
        return None if settings is None else json.dumps([settings.get(key) for key in BASELINES[kind]], sort_keys=True)

    def _problems(self) -> Iterator[str]:
        """Yield what the user has to see, the newest collapse first."""
        if self.problem:
            yield self.problem
        if self._metrics.unreadable:
            yield f"metrics.jsonl: unreadable lines: {self._metrics.unreadable}"
        rounds = sorted(self.collapsed)
        if rounds:
            yield f"the representation has collapsed in round {rounds[-1]} ({self.collapsed[rounds[-1]]})"
        lost = [round for round in self.values["clients"] if round not in self.values["loss"]]
        if self.values["loss"] and lost:
            yield f"no finite loss in rounds: {len(lost)}, the last one in round {lost[-1]}"

    def _log(self) -> list[str]:
        """Return the last lines of ``run.log``."""
        try:
            with open_regular_file(self.folder / "run.log") as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(0, size - _LOG_BYTES))
                text = stream.read(_LOG_BYTES).decode(errors="replace")
        except OSError:
            return []
        return [sanitize(line)[:500] for line in text.splitlines()[-_LOG_LINES:]]


class LayerCosines:
    """The mean cosine over clients of every layer and round, of ``clients.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / "clients.jsonl")
        self._sums: dict[str, dict[int, tuple[float, int]]] = defaultdict(dict)

    def read(self) -> dict[str, Any]:
        """Return the points of each layer, and whether those of earlier rounds were not read."""
        void, lines = self._tail.read()
        if void:
            self._sums.clear()
        for line in lines:
            if not isinstance(round := line.get("round"), int):
                continue
            for layer, cosine in _numbers(line.get("cosine")).items():
                total, number = self._sums[layer].get(round, (0.0, 0))
                self._sums[layer][round] = total + cosine, number + 1
        means = {
            sanitize(layer): thin({round: total / n for round, (total, n) in sums.items()}, MAX_LAYER_POINTS)
            for layer, sums in self._sums.items()
        }
        return {"layers": means, "layers_cut": self._tail.is_cut}


def thin(points: Points, maximum: int = MAX_POINTS, *, scale: float = 1.0) -> list[list[float]]:
    """Return at most ``maximum`` rounds and values: the lowest and the highest of equal parts, and the last ones."""
    rounds = sorted(points)
    step = -(-2 * len(rounds) // (maximum - 1)) if len(rounds) > maximum else 1
    parts = [rounds[start : start + step] for start in range(0, len(rounds), step)]
    selected = {extreme(part, key=points.__getitem__) for part in parts for extreme in (min, max)}
    return [[round, float(f"{scale * points[round]:.6g}")] for round in sorted(selected | {*rounds[-1:]})]


def _numbers(values: object) -> dict[str, float]:
    """Return the finite numbers of a mapping."""
    items = values.items() if isinstance(values, dict) else ()
    return {str(key): float(value) for key, value in items if finite_number(value)}


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


class Tail:
    """The lines of a file that have not been read.

    A last line without a line end is read when it is complete. A file that was cut, replaced or removed is read from
    its start.
    """

    def __init__(self, file: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._position, self._mark = 0, b""
        self.unreadable = 0  # lines that are no JSON object
        self.is_cut = False  # whether earlier lines were not read

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether lines that were returned before are void, and the lines of the next chunk."""
        try:
            with open_regular_file(self._file) as stream:
                void = self._restart_if_changed(stream)
                stream.seek(self._position)
                return void, [*self._lines(stream.read(CHUNK))]
        except OSError:  # missing, or not readable
            void = self._position > 0
            self._restart()
            return void, []

    def _restart(self) -> None:
        self._position, self._mark, self.unreadable, self.is_cut = 0, b"", 0, False

    def _restart_if_changed(self, stream: IO[bytes]) -> bool:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(self._position - len(self._mark))
        changed = self._position > 0 and stream.read(len(self._mark)) != self._mark
        if changed or size < self._position:
            self._restart()
        if self._position == 0 and size > self._max_bytes:
            stream.seek(size - self._max_bytes)
            stream.readline(CHUNK)
            self._position, self.is_cut = stream.tell(), True
            self._mark = b""
        return changed

    def _lines(self, content: bytes) -> Iterator[dict[str, Any]]:
        complete = content.rfind(b"\n") + 1 or (len(content) if len(content) == CHUNK else 0)
        content = content[:complete]
        self._position += complete
        self._mark = (self._mark + content)[-_MARK:]
        for line in content.splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            else:
                self.unreadable += 1
