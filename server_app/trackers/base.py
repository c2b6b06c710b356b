"""The interface of experiment trackers, and the metric names that are the same in all of them.

A result of a round has its own name (``loss``, ``knn``). Nested values of a line of ``metrics.jsonl`` are joined by
slashes (``cost/flops``, ``health/global/std``), and a final result is ``final/federated/knn``.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from fedssl.config.settings import RecordingSettings
from fedssl.errors import InputError, sanitize
from fedssl.logs import log
from fedssl.plain_values import flatten

_NON_SCALARS = ("round", "units", "dropped", "evaluation")  # keys of a line that are no scalars with their own names


def missing_package(name: str, package: str) -> InputError:
    """Return the error of a tracker whose package is not installed."""
    return InputError(
        f"tracker={name} needs the package {package}; install it: uv sync --extra {name}, or pip install {package}"
    )


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Run, as a tracker receives it before the first round."""

    folder: Path
    run_id: str  # the same after each resume
    done: int  # completed rounds of a resumed run; 0 for a new one
    settings: Mapping[str, Any]  # all settings by dotted key, as plain values


class Tracker(Protocol):
    """Interface of a tracker. Its constructor raises `InputError` if a requirement is missing."""

    def begin(self, run: TrackedRun) -> None:
        """Start or continue the tracker's run."""

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log the metrics of a round."""

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        """Log the final results of a run that is finished, failed, interrupted or paused after this round."""


class NullTracker(Tracker):
    """Tracker that does nothing."""


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of a line of ``metrics.jsonl`` by metric name."""
    rest = {key: value for key, value in line.items() if key not in _NON_SCALARS}
    return flatten_scalars({**rest, **line.get("evaluation", {}), "dropped": len(line["dropped"])})


def flatten_scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the scalars of nested mappings by path. Names have letters, digits, ``_-./`` and spaces only."""
    return {re.sub(r"[^\w\-./ ]", "_", name): number for name, number in _numbers(values, prefix)}


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


class SafeTracker:
    """Wraps the tracker of a run, whose failure must not end the run. It is disabled after the first failure."""

    def __init__(self, settings: RecordingSettings) -> None:
        self._tracker: Tracker = settings.tracker.instantiate()
        self._works = False  # nothing is logged before the run starts

    def begin(self, settings: RecordingSettings, *, done: int) -> None:
        """Log all settings. ``done`` is the number of completed rounds of a resumed run."""
        assert settings.folder is not None
        config = settings.config
        assert isinstance(config, DictConfig)
        self._works = True
        run = TrackedRun(folder=settings.folder, run_id=settings.run_id, done=done, settings=dict(flatten(config)))
        self._call(partial(self._tracker.begin, run))

    def round(self, line: Mapping[str, Any]) -> None:
        self._call(partial(self._tracker.round, line["round"], scalars_of(line)))

    def end(self, summary: Mapping[str, Any]) -> None:
        final = flatten_scalars(summary.get("final", {}), "final/")
        self._call(partial(self._tracker.end, summary["status"], round=summary["rounds"], final=final))
        self._works = False

    def _call(self, function: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            function()
        except Exception as error:  # a tracker may fail in any way: a full disk, an unreachable server
            self._works = False
            reason = " ".join(sanitize(f"{type(error).__name__}: {error}").split())[:300]
            log.warning(
                "the tracker failed and is disabled for the rest of this run, whose folder has all metrics: %s", reason
            )
