"""The interface of experiment trackers, and the metric names that are the same in all of them.

A result of a round has its own name (``loss``, ``knn``). Nested values of a line of ``metrics.jsonl`` are joined by
slashes (``cost/flops``, ``health/global/std``), and a final result is ``final/federated/knn``.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from fedssl.config.compose import flatten
from fedssl.config.settings import RecordingSettings
from fedssl.untrusted import sanitize

log = logging.getLogger("fedssl")

MISSING_PACKAGE = (
    "{} needs the package {}; install it: uv sync --extra {}, or pip install {}"  # the sentence where it lacks
)

_NON_SCALARS = ("round", "units", "dropped", "evaluation")  # keys of a line that are no numbers under their own names


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run before its first round.

    Attributes
    ----------
    folder : Path
        The run folder.
    run_id : str
        The same whenever the run goes on.
    done : int
        Rounds that a resumed run has done; 0: it is new.
    settings : mapping
        All settings by dotted key, as plain values.
    """

    folder: Path
    run_id: str
    done: int
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """A tracker; made before any work, where it refuses by an `InputError` what it needs and does not find."""

    def begin(self, run: TrackedRun) -> None:
        """Make, or go on with, what stands for the run."""

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a round."""

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        """Take the final results: of a run that is ``finished``, ``failed`` or ``interrupted`` after this round."""


class NullTracker:
    """No tracker."""

    def begin(self, run: TrackedRun) -> None:
        """Do nothing."""

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        """Do nothing."""

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        """Do nothing."""


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a line of ``metrics.jsonl`` by the names that all trackers give them."""
    rest = {key: value for key, value in line.items() if key not in _NON_SCALARS}
    return flatten_scalars({**rest, **line.get("evaluation", {}), "dropped": len(line["dropped"])})


def flatten_scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers in nested mappings by their path; names have letters, digits and ``_-./`` and spaces only."""
    return {re.sub(r"[^\w\-./ ]", "_", name): number for name, number in _numbers(values, prefix)}


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


class SafeTracker:
    """Tells the tracker of a run what it is to know, until it fails.

    Parameters
    ----------
    settings : RecordingSettings

    Raises
    ------
    InputError
        The tracker cannot work here, e.g. its package is not installed.
    """

    def __init__(self, settings: RecordingSettings) -> None:
        self._tracker: Tracker = settings.tracker.instantiate()
        self._works = False  # before the run begins there is nothing to tell

    def begin(self, settings: RecordingSettings, *, done: int) -> None:
        """Tell all settings; ``done`` are the rounds that a resumed run has done."""
        assert settings.folder is not None
        config = OmegaConf.create(settings.resolved_yaml)
        assert isinstance(config, DictConfig)
        self._works = True
        run = TrackedRun(folder=settings.folder, run_id=settings.run_id, done=done, settings=dict(flatten(config)))
        self._call(partial(self._tracker.begin, run))

    def round(self, line: Mapping[str, Any]) -> None:
        """Tell the numbers in a line of ``metrics.jsonl``."""
        self._call(partial(self._tracker.round, line["round"], scalars_of(line)))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell the results in a summary, and how the run ended."""
        final = flatten_scalars(summary.get("final", {}), "final/")
        self._call(partial(self._tracker.end, summary["status"], round=summary["rounds"], final=final))
        self._works = False

    def _call(self, tell: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            tell()
        except Exception as error:  # a tracker may fail in any way: a full disk, a server that is gone
            self._works = False
            reason = " ".join(sanitize(f"{type(error).__name__}: {error}").split())[:300]
            log.warning("the tracker fails and is told no more of this run, whose folder has all numbers: %s", reason)
