"""Settings of aggregation, secure aggregation and differential privacy."""

from dataclasses import dataclass


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
    delay_sigma : float
        Spread of the virtual training times of simulated clients with ``buffered``, see
        `server_app.messaging.DelayedExchange`; 0: all clients are equally fast.
    max_norm_ratio : float or None
        Largest ratio of an update's norm to the median norm of the round, at least 1; None disables the filter. The
        filter holds all updates of a round in memory.
    max_examples : int or None
        Largest number of images that a client may report, at least 1; None allows any.
    """

    min_updates: int = 1
    max_retries: int = 0
    over_selection: int = 0
    round_deadline: float | None = None
    buffered: bool = False
    delay_sigma: float = 1.0
    max_norm_ratio: float | None = None
    max_examples: int | None = None


@dataclass(frozen=True, kw_only=True)
class SecureAggregationSettings:
    """Secure aggregation, see `server_app.secure_aggregation`.

    Attributes
    ----------
    clipping_range : float
        Largest change of a number in an update.
    threshold : float
        Fraction of the clients that must complete the protocol, above 0.5 and at most 1.
    """

    clipping_range: float
    threshold: float


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
    """

    clip_norm: float
    noise_multiplier: float
    delta: float
