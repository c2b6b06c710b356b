"""Learning rate schedules over rounds: pure functions of the round, whose value the server sends with the plan.

Each function maps a round, counted from 1, the number of rounds of the run and the phase to the factor of the
optimizer's learning rate. The rate is constant within a round, so that it does not depend on how often a client
participates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedssl.config.constraints import check_arguments
from fedssl.schedule.phases import Phase, phase_at


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate schedule of a run."""

    factor: Callable[..., float]  # one of the functions below, with its specific arguments bound
    phases: Sequence[Phase]  # which cover all rounds
    rounds: int  # of the run

    def __call__(self, round: int) -> float:
        """Return the factor of a round, counted from 1."""
        return self.factor(round, rounds=self.rounds, phase=self.phase(round))

    def phase(self, round: int) -> Phase:
        return phase_at(self.phases, round)


def constant(round: int, *, rounds: int, phase: Phase) -> float:
    """Return 1 in each round."""
    return 1.0


def cosine(round: int, *, rounds: int, phase: Phase, per_stage: bool = False, eta_min_factor: float = 0.0) -> float:
    r"""Decay from 1 in the first round to ``eta_min_factor``, in round R + 1, which does not run, along half a cosine.

    $$
    \eta_r = \eta \left( \epsilon + (1 - \epsilon) \frac{1 + \cos(\pi (r - r_s) / R_s)}{2} \right)
    $$

    with $\epsilon$ the ``eta_min_factor``, and $r_s$, $R_s$ the first round and the number of rounds of the run or,
    with ``per_stage``, of the phase.
    """
    check_arguments("lr_schedule", eta_min_factor=eta_min_factor)
    done = (round - phase.first) / phase.rounds if per_stage else (round - 1) / rounds
    return eta_min_factor + (1 - eta_min_factor) * (1 + math.cos(math.pi * done)) / 2


def step(round: int, *, rounds: int, phase: Phase, milestones: Sequence[float], factor: float) -> float:
    r"""Multiply the learning rate by ``factor`` at each milestone.

    $$
    \eta_r = \eta \, \gamma^{c_r}
    $$

    with $c_r$ the number of milestones m with $m R \le r - 1$.
    """
    check_arguments("lr_schedule", milestones=milestones, factor=factor)
    done = round - 1 + 1e-9  # 0.55 * 100 is slightly more than 55 in floating point
    return float(factor ** sum(done >= milestone * rounds for milestone in milestones))
