"""Learning rates over the rounds: pure functions of the round, whose value the server sends with the plan.

Every function maps a round, counted from 1, the number of rounds of the run and its phase to the factor
by which the optimizer's learning rate is multiplied in that round. Within a round the rate is constant: a client that
takes part in few rounds is no further on its way than the others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedssl.errors import InputError
from fedssl.schedule.phases import Phase, phase_at


@dataclass(frozen=True)
class LRSchedule:
    """The learning rates of a run.

    Attributes
    ----------
    factor : callable
        One of the functions below, with its own arguments given.
    phases : sequence of Phase
        They cover all rounds.
    rounds : int
    """

    factor: Callable[..., float]
    phases: Sequence[Phase]
    rounds: int

    def __call__(self, round: int) -> float:
        """The factor of a round, counted from 1."""
        return self.factor(round, rounds=self.rounds, phase=self.phase(round))

    def phase(self, round: int) -> Phase:
        """The phase that the round belongs to."""
        return phase_at(self.phases, round)


def constant(round: int, *, rounds: int, phase: Phase) -> float:
    """1 in every round."""
    return 1.0


def cosine(round: int, *, rounds: int, phase: Phase, per_stage: bool = False, least: float = 0.0) -> float:
    """From 1 in the first round along half a cosine towards ``least``, which the round after the last would have.

    Parameters
    ----------
    per_stage : bool
        Whether it begins anew with every phase of the schedule (LW-FedSSL's "cyclic").
    least : float
        In [0, 1].

    Raises
    ------
    InputError
        If ``least`` is out of range.
    """
    if not 0 <= least <= 1:
        raise InputError(f"lr_schedule.least={least} must be in [0, 1]; 0 goes down to nothing")
    done = (round - phase.first) / phase.rounds if per_stage else (round - 1) / rounds
    return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2


def step(round: int, *, rounds: int, phase: Phase, milestones: Sequence[float], factor: float) -> float:
    """Multiplied by ``factor`` at each milestone.

    Parameters
    ----------
    milestones : sequence of float
        Shares of the run in (0, 1): 0.5 is the first round of its second half.
    factor : float
        In (0, 1].

    Raises
    ------
    InputError
        If a milestone or ``factor`` is out of range.
    """
    if not all(0 < milestone < 1 for milestone in milestones):
        raise InputError(f"lr_schedule.milestones={list(milestones)} must be shares of the run, above 0 and below 1")
    if not 0 < factor <= 1:
        raise InputError(f"lr_schedule.factor={factor} must be above 0 and at most 1")
    done = round - 1 + 1e-9  # 0.55 * 100 is a little more than 55
    return float(factor ** sum(done >= milestone * rounds for milestone in milestones))
