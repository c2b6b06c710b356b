"""What a tracker is, and the names that numbers have in all of them.

A result of the rounds has its own name (``loss``, ``knn``), what is nested in a line of ``metrics.jsonl`` one with
slashes (``cost/flops``, ``health/global/spread``), and a final result ``final/federated/knn``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
