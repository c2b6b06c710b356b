"""Settings of what a server takes from its clients, in what form, and how long it waits for it."""

import math
from dataclasses import dataclass
from typing import Any

from fedssl.errors import InputError


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """What a server takes from clients, and how long it waits for it.

    Attributes
    ----------
    min_updates : int
        How many a round needs.
    max_retries : int
        How often a round with fewer is repeated, with other clients, before the run stops.
    over_selection : int
        How many more clients than ``clients_per_round`` are asked; the first ``clients_per_round`` to reply count.
    round_deadline : float or None
        Seconds after which a round goes on without those that are missing; None: as long as replies come.
    buffered : bool
        Whether a round ends with ``min_updates``, and late ones count in the next, the less the older they are.
    max_norm_ratio : float or None
        How many times as far as the median of a round an update may move, at least 1; None: any. With a number all
        updates of a round are kept in memory until the last is there.
    max_examples : int or None
        How many images a client may say that it has, at least 1; None: any number.

    Raises
    ------
    InputError
        One of them is not such a value.
    """

    min_updates: int = 1
    max_retries: int = 0
    over_selection: int = 0
    round_deadline: float | None = None
    buffered: bool = False
    max_norm_ratio: float | None = None
    max_examples: int | None = None

    def __post_init__(self) -> None:
        for name, minimum in {"min_updates": 1, "max_retries": 0, "over_selection": 0, "max_examples": 1}.items():
            value = getattr(self, name)
            if (name, value) != ("max_examples", None) and (type(value) is not int or value < minimum):
                raise InputError(f"aggregation.{name}={value} must be a whole number of at least {minimum}")
        if self.round_deadline is not None:
            _check_number("aggregation.round_deadline", self.round_deadline, also=", or null")
        if self.max_norm_ratio is not None:
            _check_number("aggregation.max_norm_ratio", self.max_norm_ratio, minimum=1, also=", or null")


@dataclass(frozen=True, kw_only=True)
class SecureAggregationSettings:
    """Secure aggregation, see `server_app.secure_aggregation`.

    Attributes
    ----------
    clipping_range : float
        No number of an update may change by more.
    threshold : float
        Share of the clients that must reply to the end, above 0.5 and at most 1.

    Raises
    ------
    InputError
        One of them is not such a number.
    """

    clipping_range: float
    threshold: float

    def __post_init__(self) -> None:
        _check_number("secure_aggregation.clipping_range", self.clipping_range)
        _check_number("secure_aggregation.threshold", self.threshold, above=0.5, maximum=1)


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Differential privacy by the server, see `server_app.differential_privacy`.

    Attributes
    ----------
    clip_norm : float
        Longest way of an update, by its 2-norm over all weights.
    noise_multiplier : float
        Standard deviation of the noise on the sum, in multiples of ``clip_norm``.
    delta : float
        Probability with which epsilon may not hold.

    Raises
    ------
    InputError
        One of them is not such a number.
    """

    clip_norm: float
    noise_multiplier: float
    delta: float

    def __post_init__(self) -> None:
        _check_number("privacy.clip_norm", self.clip_norm)
        _check_number("privacy.noise_multiplier", self.noise_multiplier)
        _check_number("privacy.delta", self.delta, below=1)


def _check_number(
    key: str,
    value: Any,
    *,
    above: float = 0,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    below: float = math.inf,
    also: str = "",
) -> None:
    """Refuse, by an `InputError`, what is no number within these bounds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and above < value < below and minimum <= value <= maximum:
        return
    said = [f"of at least {minimum:g}" if minimum > -math.inf else f"above {above:g}"]
    said += [f"below {below:g}"] if below < math.inf else []
    said += [f"at most {maximum:g}"] if maximum < math.inf else []
    raise InputError(f"{key}={value} must be a number {' and '.join(said)}{also}")
