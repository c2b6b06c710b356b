"""The outcome of a round, as the log keeps it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ClientMetrics:
    """What the server knows of one client's part in a round; the fields are the keys of ``clients.jsonl``.

    ``model`` is the name of the model that the client started from. ``cosine`` has that of every layer with it,
    ``model_cosine`` that of all weights as one vector (L-DAWA, Eq. 2 and Fig. 4), and ``layer_cosine`` the mean over
    layers, see `fedssl.arrays.Cosines`; None: no weights travelled. ``staleness`` counts the rounds since the plan that it
    answers.
    """

    round: int
    client: int
    model: str
    loss: float | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    examples: int | None
    cosine: dict[str, float]
    model_cosine: float | None
    layer_cosine: float | None
    staleness: int = 0


@dataclass(frozen=True)
class RoundResult:
    """Outcome of a round.

    Attributes
    ----------
    clients : list of ClientMetrics
        A row for each update that was used.
    dropped : dict of int to str
        The reason for each client whose update was not.
    late : list of int
        Clients that replied to an older plan, which was not used any more.
    privacy : dict
        Epsilon after this round, and its delta; empty without differential privacy.
    strategy_metrics : dict
        What the strategy found out, ready for JSON.
    """

    round: int
    clients: list[ClientMetrics] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    privacy: dict[str, float] = field(default_factory=dict)
    strategy_metrics: dict[str, Any] = field(default_factory=dict)
