"""How far a run is, and its line for the log.

round 12/200  loss 4.810  cosine 0.9812  knn 61.3%  14.2 s/round  44 min left
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from fedssl.evaluation.scores import Score

_RECENT = 5  # rounds whose mean time is the pace


@dataclass(frozen=True, kw_only=True)
class ProgressSnapshot:
    """How far a run is after a round.

    Attributes
    ----------
    round, rounds : int
        The one that is done, and how many there are.
    loss, cosine : float or None
        Means over the round's clients; None: there are none.
    evaluation : mapping of str to Score
        Empty in rounds without one.
    dropped : int
        Clients.
    seconds_per_round : float
        Seconds that the last rounds took on average.
    """

    round: int
    rounds: int
    loss: float | None
    cosine: float | None
    evaluation: Mapping[str, Score]
    dropped: int
    seconds_per_round: float

    @property
    def results(self) -> list[str]:
        """What was evaluated, for people."""
        return [f"{name} {score.text}" for name, score in self.evaluation.items()]

    @property
    def eta(self) -> str:
        """The time that all other rounds will take."""
        return f"{_duration(self.seconds_per_round * (self.rounds - self.round))} left"

    @property
    def log_line(self) -> str:
        """For the log."""
        parts = [f"round {self.round}/{self.rounds}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.cosine is not None:
            parts.append(f"cosine {self.cosine:.4f}")
        parts += self.results
        if self.dropped:
            parts.append(f"{self.dropped} dropped")
        return "  ".join([*parts, f"{self.seconds_per_round:.1f} s/round", self.eta])


class ProgressTracker:
    """Tells how far a run is after one round after another.

    Parameters
    ----------
    rounds : int
        Of the run.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._times: list[float] = []

    def after(self, row: Mapping[str, Any], evaluation: Mapping[str, Score]) -> ProgressSnapshot:
        """How far it is after a round, from its row of ``metrics.jsonl`` and what was evaluated."""
        self._times.append(row["seconds"])
        return ProgressSnapshot(
            round=row["round"],
            rounds=self._rounds,
            loss=row["loss"],
            cosine=row["model_cosine"],
            evaluation=evaluation,
            dropped=len(row["dropped"]),
            seconds_per_round=mean(self._times[-_RECENT:]),
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
