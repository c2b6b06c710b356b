"""Schedules of a method's numbers over the rounds of a run; the papers define them over steps or epochs.

A number is constant within a round, so that it does not depend on how often a client participates.
"""

import math


def cosine_increase(start: float, *, end: float, round: int, rounds: int) -> float:
    """Return a number that increases from ``start`` in round 1 to ``end`` in the last round, along half a cosine.

    DINO (arXiv 2104.14294) and I-JEPA (arXiv 2301.08243) increase the decay of the target to 1. With one round the
    number is ``start``.
    """
    done = (round - 1) / max(rounds - 1, 1)
    return end - (end - start) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def linear_warmup(start: float, *, end: float, round: int, warmup_rounds: int) -> float:
    """Return a number that increases linearly from ``start`` in round 1 to ``end`` in round ``warmup_rounds + 1``."""
    return start + (end - start) * min((round - 1) / max(warmup_rounds, 1), 1.0) if warmup_rounds else end
