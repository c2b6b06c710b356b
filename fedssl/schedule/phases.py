"""Phases of a run: the encoder stages that run and that are trained in each round.

``end_to_end`` trains everything from the first round. ``layer_wise`` is FedMoCo-LW's and LW-FedSSL's (Tun et al., arXiv
2401.11647, Section 4): the encoder grows by one stage per phase, and only the newest stage is trained. ``progressive``
is Prog-FedSSL's (Section 4.3): the encoder grows likewise, and all stages are trained. Heads, and the normalization
after a vision transformer's blocks, are always trained. The patch embedding (a ResNet's first convolution) belongs to
the first stage, which reproduces the FLOPs of the paper's Table 3; the paper does not state when it is trained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fedssl.config.constraints import check_arguments
from fedssl.config.settings import ScheduleSettings
from fedssl.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive rounds in which the same stages of the encoder run and are trained."""

    number: int  # from 1
    first: int  # round
    rounds: int  # number of rounds
    depth: int  # number of stages that run
    frozen: int = 0  # number of these, counted from the first, that are frozen
    # Whether the newest stage starts with the weights of the previous one (Section 5.1 and Appendix B.2).
    weight_transfer: bool = False
    depth_dropout: float = 0.0  # probability that a frozen stage is skipped in a training step


def make_phases(settings: ScheduleSettings, *, stages: int, frozen: int = 0) -> list[Phase]:
    """Return the phases of a run, in order, for an encoder with this number of stages; they cover all rounds.

    At least ``frozen`` stages are frozen in all phases (`fedssl.encoders.base.Encoder.frozen_stages`).
    """
    if stages == 1 and settings.phases.name in (layer_wise.__name__, progressive.__name__):
        raise InputError(
            f"schedule={settings.phases.name} trains an encoder stage by stage, but this encoder has one stage; set "
            "schedule=end_to_end, or choose another encoder"
        )
    phases: list[Phase] = settings.phases.instantiate()(rounds=settings.rounds, depth=stages)
    return [replace(phase, frozen=max(phase.frozen, frozen)) for phase in phases]


def end_to_end(*, rounds: int, depth: int) -> list[Phase]:
    r"""Return one phase with the whole encoder in all rounds.

    $$
    F = L_S \circ \cdots \circ L_1 \qquad \theta_{\text{trained}} = \{ L_1, \dots, L_S, H, P \}
    $$

    with $L_s$ the stages of the encoder, and H, P the heads.
    """
    return [Phase(number=1, first=1, rounds=rounds, depth=depth)]


def layer_wise(
    *,
    rounds: int,
    depth: int,
    rounds_per_stage: str | Sequence[int] = "uniform",
    weight_transfer: bool = True,
    depth_dropout: float = 0.0,
) -> list[Phase]:
    r"""Return phases in which stages 1 to s run in phase s and only stage s is trained.

    $$
    F_s = L_s \circ \cdots \circ L_1 \qquad \theta_{\text{trained}} = \{ L_s, H, P \} \qquad
    s(r) = \min \Big\{ s : r \le \sum_{j=1}^{s} R_j \Big\}
    $$

    with $R_s$ the rounds of phase s (`split_rounds`), and H, P the heads. With ``weight_transfer`` a phase starts with
    $L_s \leftarrow L_{s-1}$ where shapes are equal. ``depth_dropout`` is that of FLL (Guo et al., arXiv 2309.05213).
    """
    check_arguments("schedule", depth_dropout=depth_dropout, rounds_per_stage=rounds_per_stage)
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
    r"""Return phases in which stages 1 to s run in phase s and all are trained; parameters as in `layer_wise`.

    $$
    F_s = L_s \circ \cdots \circ L_1 \qquad \theta_{\text{trained}} = \{ L_1, \dots, L_s, H, P \}
    $$
    """
    check_arguments("schedule", rounds_per_stage=rounds_per_stage)
    return [
        Phase(number=s, first=first, rounds=n, depth=s, weight_transfer=weight_transfer)
        for s, first, n in _stretches(rounds, depth, rounds_per_stage)
    ]


def split_rounds(rounds: int, stages: int, shares: str | Sequence[int]) -> list[int]:
    r"""Return the number of rounds of each stage; a sequence of ``shares`` gives them directly.

    "left_skewed": more rounds for later stages, "right_skewed": for earlier ones (Section 5.10). Each stage has at
    least one round; the remaining rounds are divided equally ("uniform"), or in proportion to 1, 2, ..., S (the paper
    shows its shares only as a figure).

    $$
    A_s = \sum_{j=1}^{s} a_j \qquad E_s = \left\lfloor (R - S) \frac{A_s}{A_S} + \frac{1}{2} \right\rfloor \qquad
    R_s = 1 + E_s - E_{s-1}
    $$

    with $a_j$ = 1 ("uniform") or j ("left_skewed"). "right_skewed" has the numbers of "left_skewed" in reverse.
    """
    if isinstance(shares, str):
        if rounds < stages:
            raise InputError(
                f"rounds={rounds} but the encoder has {stages} stages, each of which needs at least one round; "
                f"set rounds={stages} or more"
            )
        weights = [1] * stages if shares == "uniform" else list(range(1, stages + 1))
        cumulative = [sum(weights[:number]) for number in range(stages + 1)]
        # Cumulative rounding, so that the sum is exact.
        ends = [math.floor((rounds - stages) * part / cumulative[-1] + 0.5) for part in cumulative]
        counts = [1 + end - start for start, end in pairwise(ends)]
        return counts[::-1] if shares == "right_skewed" else counts
    counts = list(shares)
    if len(counts) != stages or sum(counts) != rounds or min(counts) < 1:
        raise InputError(
            f"schedule.rounds_per_stage={counts} must be {stages} integers of at least 1, one per encoder stage, "
            f"whose sum is rounds={rounds}"
        )
    return counts


def phase_at(phases: Sequence[Phase], round: int) -> Phase:
    """Return the phase of a round."""
    return next(phase for phase in reversed(phases) if phase.first <= round)


def _stretches(rounds: int, depth: int, shares: str | Sequence[int]) -> list[tuple[int, int, int]]:
    """Return number, first round and number of rounds of each phase."""
    counts = split_rounds(rounds, depth, shares)
    return [(number, 1 + sum(counts[: number - 1]), count) for number, count in enumerate(counts, start=1)]
