"""The phases of a run: which stages of the encoder run, and which are trained, in every round.

``end_to_end`` trains everything from the first round on. ``layer_wise`` is FedMoCo-LW's and LW-FedSSL's (Tun et al.,
arXiv 2401.11647, Section 4): the encoder grows by one stage at a time, and only the newest is trained. ``progressive``
is Prog-FedSSL's (Section 4.3): it grows as well, and all of it is trained. Heads, and the normalization behind a vision
transformer's blocks, are always trained. The patch embedding (a ResNet's first convolution) belongs to the first stage,
which reproduces the FLOPs of the paper's Table 3; the paper does not say when it is trained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedssl.config.settings import ScheduleSettings
from fedssl.errors import InputError

SHARES = ("uniform", "left_skewed", "right_skewed")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of rounds in which the same stages of the encoder run and are trained.

    Attributes
    ----------
    number : int
        From 1 on.
    first, rounds : int
        Its first round and how many there are.
    depth, frozen : int
        Stages of the encoder that run, and how many of these, from the first on, are not trained.
    weight_transfer : bool
        Whether the encoder's newest stage begins with the weights of the one before (Section 5.1 and Appendix B.2).
    depth_dropout : float
        Depth dropout: probability that a frozen stage is left out of a training step.
    """

    number: int
    first: int
    rounds: int
    depth: int
    frozen: int = 0
    weight_transfer: bool = False
    depth_dropout: float = 0.0


def make_phases(settings: ScheduleSettings, *, stages: int) -> list[Phase]:
    """The phases of a run for an encoder with so many stages, in order; they cover all rounds."""
    phases: list[Phase] = settings.phases.make()(rounds=settings.rounds, depth=stages)
    return phases


def end_to_end(*, rounds: int, depth: int) -> list[Phase]:
    """One phase: the whole encoder in every round."""
    return [Phase(number=1, first=1, rounds=rounds, depth=depth)]


def layer_wise(
    *,
    rounds: int,
    depth: int,
    rounds_per_stage: str | Sequence[int] = "uniform",
    weight_transfer: bool = True,
    depth_dropout: float = 0.0,
) -> list[Phase]:
    """Stages 1 to s run in phase s, and only s is trained.

    Parameters
    ----------
    rounds : int
        Of the run.
    depth : int
        Stages of the encoder.
    rounds_per_stage : str or sequence of int
        See `split_rounds`.
    weight_transfer : bool
        Whether a new stage begins with the weights of the one before, where shapes allow it.
    depth_dropout : float
        In [0, 1): probability that a frozen stage is left out of a training step, as in FLL (Guo et al., arXiv
        2309.05213), which takes 0.5.

    Raises
    ------
    InputError
        A number is out of range, or the rounds do not suffice.
    """
    if not 0 <= depth_dropout < 1:
        raise InputError(f"schedule.depth_dropout={depth_dropout} must be at least 0 and below 1; 0 turns it off")
    return [
        Phase(
            number=s,
            first=first,
            rounds=n,
            depth=s,
            frozen=s - 1,
            weight_transfer=weight_transfer,
            depth_dropout=depth_dropout,
        )
        for s, first, n in _stretches(rounds, depth, rounds_per_stage)
    ]


def progressive(
    *, rounds: int, depth: int, rounds_per_stage: str | Sequence[int] = "uniform", weight_transfer: bool = True
) -> list[Phase]:
    """Stages 1 to s run in phase s, and all of them are trained; parameters as in `layer_wise`."""
    return [
        Phase(number=s, first=first, rounds=n, depth=s, weight_transfer=weight_transfer)
        for s, first, n in _stretches(rounds, depth, rounds_per_stage)
    ]


def split_rounds(rounds: int, stages: int, shares: str | Sequence[int]) -> list[int]:
    """How many rounds each stage gets.

    Parameters
    ----------
    shares : {"uniform", "left_skewed", "right_skewed"} or sequence of int
        "left_skewed": more rounds for later stages, "right_skewed": for earlier ones (Section 5.10). Every stage has
        one round; the others are divided equally, or in proportion to 1, 2, ..., S (the paper shows its shares as an
        image only). A sequence gives the rounds themselves.

    Raises
    ------
    InputError
        Too few rounds, an unknown word, or a sequence of another length or sum.
    """
    if isinstance(shares, str):
        if shares not in SHARES:
            raise InputError(
                f"schedule.rounds_per_stage={shares} is unknown; choose one of {', '.join(SHARES)} or give a list"
            )
        if rounds < stages:
            raise InputError(
                f"rounds={rounds} but the encoder has {stages} stages, each of which needs a round; "
                f"set rounds={stages} or more"
            )
        weights = [1] * stages if shares == "uniform" else list(range(1, stages + 1))
        sums = [sum(weights[:number]) for number in range(stages + 1)]
        # What is beyond whole numbers goes to the next stage, so that nothing is lost.
        ends = [math.floor((rounds - stages) * part / sums[-1] + 0.5) for part in sums]
        counts = [1 + end - start for start, end in pairwise(ends)]
        return counts[::-1] if shares == "right_skewed" else counts
    counts = list(shares)
    if len(counts) != stages or sum(counts) != rounds or min(counts) < 1:
        raise InputError(
            f"schedule.rounds_per_stage={counts} must be {stages} whole numbers of at least 1, one for each stage of "
            f"the encoder, whose sum is rounds={rounds}"
        )
    return counts


def phase_at(phases: Sequence[Phase], round: int) -> Phase:
    """The phase that a round belongs to."""
    return next(phase for phase in reversed(phases) if phase.first <= round)


def _stretches(rounds: int, depth: int, shares: str | Sequence[int]) -> list[tuple[int, int, int]]:
    """Number, first round and rounds of every phase."""
    counts = split_rounds(rounds, depth, shares)
    return [(number, 1 + sum(counts[: number - 1]), count) for number, count in enumerate(counts, start=1)]
