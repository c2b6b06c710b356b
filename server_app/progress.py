"""The progress lines of a run.

round 12/200  loss 4.810  cosine 0.9812  knn 61.3%  14.2 s/round  44 min left
"""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from fedssl.evaluation.scores import Score

_RECENT = 5  # rounds whose mean time is the pace


class Progress:
    """Makes the line of one round after another.

    Parameters
    ----------
    rounds : int
        Of the run.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._times: list[float] = []

    def line(self, row: Mapping[str, Any], evaluation: Mapping[str, Score]) -> str:
        """Make the line of a round from its row of ``metrics.jsonl`` and what was evaluated."""
        self._times.append(row["seconds"])
        pace = mean(self._times[-_RECENT:])
        parts = [f"round {row['round']}/{self._rounds}"]
        if row["loss"] is not None:
            parts.append(f"loss {row['loss']:.3f}")
        if row["model_cosine"] is not None:
            parts.append(f"cosine {row['model_cosine']:.4f}")
        parts += [f"{name} {score.text}" for name, score in evaluation.items()]
        if row["dropped"]:
            parts.append(f"{len(row['dropped'])} dropped")
        left = pace * (self._rounds - row["round"])
        parts += [f"{pace:.1f} s/round", f"{_duration(left)} left"]
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
