"""The line of a round: its cost and values, the files, the tracker and the console."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

import numpy as np

from fedssl.config.settings import RecordingSettings
from fedssl.errors import DISK_ERRORS
from fedssl.logs import log
from fedssl.step_cost import TrainingCostMeter
from server_app.callbacks.base import Callback, RoundEnd
from server_app.console import IS_ROUND, PlainConsole, ProgressSnapshot
from server_app.run_folder import RunFolder
from server_app.trackers.base import SafeTracker
from server_app.updates import RoundResult
from strategies.types import ServerState

_RECENT = 5  # rounds of the mean time


class Costs(Callback):
    """Adds the cost of training to the line. ``wait`` returns when nothing else uses the GPU, which is measured."""

    def __init__(self, meter: TrainingCostMeter, *, wait: Callable[[], None]) -> None:
        self._meter, self._wait = meter, wait

    def on_round_end(self, end: RoundEnd) -> None:
        self._wait()
        cost = self._meter(end.phase, [row.client for row in end.result.clients])
        if cost:
            end.line["cost"] = dict(cost)


class Lines(Callback):
    """Appends the lines of every round to the files of the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_round_end(self, end: RoundEnd) -> None:
        self._folder.check_place()
        self._check_clients(end.result)
        end.line = line_of(end.result, seconds=end.seconds) | end.line
        lines = {**end.lines, "clients.jsonl": [row.line() for row in end.result.clients], "metrics.jsonl": [end.line]}
        for name, rows in lines.items():
            self._folder.lines[name].append(rows)
        for file in self._folder.lines.values():
            file.end_round(end.state.round)

    def _check_clients(self, result: RoundResult) -> None:
        """Raise `OSError` if clients of this machine were dropped for a full disk, so that `resume` repeats them."""
        reasons = result.dropped.values()
        codes = [code for code in DISK_ERRORS if any(os.strerror(code) in reason for reason in reasons)]
        if codes and (self._folder.path / "clients").is_dir():
            raise OSError(codes[0], os.strerror(codes[0]))


class Tracking(Callback):
    """Logs the settings and the lines of a run in its tracker."""

    def __init__(self, tracker: SafeTracker, settings: RecordingSettings) -> None:
        self._tracker, self._settings = tracker, settings

    def on_run_start(self, state: ServerState) -> None:
        self._tracker.begin(self._settings, done=state.round)

    def on_round_end(self, end: RoundEnd) -> None:
        self._tracker.round(end.line)


class Progress(Callback):
    """Logs a line per round and shows the progress on the screen."""

    def __init__(self, screen: PlainConsole, *, rounds: int) -> None:
        self._screen, self._rounds = screen, rounds
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    def on_run_start(self, state: ServerState) -> None:
        self._screen.set_completed(state.round)

    def on_round_end(self, end: RoundEnd) -> None:
        self._seconds.append(end.line["seconds"])
        snapshot = ProgressSnapshot(
            line=end.line, evaluation=end.evaluation, rounds=self._rounds, seconds_per_round=mean(self._seconds)
        )
        log.info(snapshot.log_line, extra={IS_ROUND: True})
        self._screen.show(snapshot)


def line_of(result: RoundResult, *, seconds: float) -> dict[str, Any]:
    """Return the values of a round that are known when it ends."""
    rows = result.clients
    line: dict[str, Any] = {
        "round": result.round,
        "loss": _mean(row.loss for row in rows),
        "model_cosine": _mean(row.model_cosine for row in rows),
        "layer_cosine": _mean(row.layer_cosine for row in rows),
        "seconds": seconds,
        "client_seconds": _mean(row.seconds for row in rows),
        "clients": len(rows),
        "dropped": {str(client): reason for client, reason in result.dropped.items()},
        "bytes_up": sum(row.bytes_up for row in rows),
        "bytes_down": sum(row.bytes_down for row in rows),
    }
    line |= result.measured
    received = [row.base_bytes for row in rows if row.base_bytes]
    further = {
        "base": {"bytes": sum(received), "clients": len(received)} if received else {},
        **result.features,
        "late": len(result.late),
        "strategy_metrics": result.strategy_metrics,
    }
    return line | result.state_metrics | {key: value for key, value in further.items() if value}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
