"""Settings of aggregation, secure aggregation and differential privacy."""

import math
from dataclasses import dataclass
from typing import Any

from fedssl.errors import InputError


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """Which updates a round accepts, and how long it waits for them.

    Attributes
    ----------
    min_updates : int
        Minimum number of updates in a round.
    max_retries : int
        How often a round with fewer updates is repeated with other clients before the run stops.
    over_selection : int
        Number of clients sampled beyond ``clients_per_round``. The first ``clients_per_round`` replies are used.
    round_deadline : float or None
        Seconds after which a round ends without the missing clients; None waits for all.
    buffered : bool
        Whether a round ends with ``min_updates``, and later rounds use stale updates with smaller weights (FedBuff).
    max_norm_ratio : float or None
        Largest ratio of an update's norm to the median norm of the round, at least 1; None disables the filter. The
        filter holds all updates of a round in memory.
    max_examples : int or None
        Largest number of images that a client may report, at least 1; None allows any.

    Raises
    ------
    InputError
        A value is out of range.
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
                raise InputError(f"aggregation.{name}={value} must be an integer of at least {minimum}")
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
        Largest change of a number in an update.
    threshold : float
        Fraction of the clients that must complete the protocol, above 0.5 and at most 1.

    Raises
    ------
    InputError
        A value is out of range.
    """

    clipping_range: float
    threshold: float

    def __post_init__(self) -> None:
        _check_number("secure_aggregation.clipping_range", self.clipping_range)
        _check_number("secure_aggregation.threshold", self.threshold, above=0.5, maximum=1)


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Central differential privacy, see `server_app.differential_privacy`.

    Attributes
    ----------
    clip_norm : float
        Largest 2-norm of an update over all weights.
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by ``clip_norm``.
    delta : float
        Probability that the epsilon guarantee fails.

    Raises
    ------
    InputError
        A value is out of range.
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
    """Raise `InputError` if the value is not a number within the bounds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and above < value < below and minimum <= value <= maximum:
        return
    bounds = [f"of at least {minimum:g}" if minimum > -math.inf else f"above {above:g}"]
    bounds += [f"below {below:g}"] if below < math.inf else []
    bounds += [f"at most {maximum:g}"] if maximum < math.inf else []
    raise InputError(f"{key}={value} must be a number {' and '.join(bounds)}{also}")
