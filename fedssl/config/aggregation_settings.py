"""Settings of aggregation, secure aggregation and differential privacy."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """Which updates a round accepts, and how long it waits for them."""

    min_updates: int = 1  # minimum number of updates in a round
    max_retries: int = 0  # how often a round with fewer updates is repeated with other clients before the run stops
    over_selection: int = 0  # clients sampled beyond ``clients_per_round``, whose first replies are used
    # Seconds after which a round ends without the missing clients, virtual ones with a ``client_speed``; None waits for
    # all.
    round_deadline: float | None = None
    # Whether a round ends with ``min_updates``, and later rounds use stale updates with smaller weights (FedBuff).
    buffered: bool = False
    # Spread of the virtual delays of simulated clients with ``buffered`` or ``over_selection`` and without a
    # ``client_speed``, see `sample_delay`; 0: all clients are equally fast.
    delay_sigma: float = 1.0
    # Largest ratio of an update's norm to the median norm of the round, at least 1; None disables the filter. The
    # filter holds all updates of a round in memory.
    max_norm_ratio: float | None = None
    max_examples: int | None = None  # largest number of images that a client may report, at least 1; None allows any


@dataclass(frozen=True, kw_only=True)
class SecureAggregationSettings:
    """Settings of secure aggregation."""

    clipping_range: float  # largest change of a number in an update
    dropout_fraction: float = 0.2  # fraction of the clients of a round that may drop out, rounded up
    corrupted_fraction: float = 0.2  # fraction that may collude with the server, rounded up
    security_bits: float = 40  # -log2 of the probability that a sum is not private
    correctness_bits: float = 30  # -log2 of the probability that masks cannot be removed
    neighbors: int | None = None  # of every client; None: the smallest number for these bounds
    threshold: int | None = None  # number of shares that reveal a mask; None: the smallest number for these bounds
    # Largest number of images of a client, by which weights become integers; None: ``max_examples``, or that of the
    # largest simulated client.
    max_weight: int | None = None
    mask_generator: str = "chacha20"  # see `add_mask`


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Central differential privacy, see `strategies.mods.privacy`."""

    clip_norm: float  # largest 2-norm of an update over all weights
    noise_multiplier: float  # standard deviation of the noise on the sum, divided by ``clip_norm``
    delta: float  # probability that the epsilon guarantee fails
