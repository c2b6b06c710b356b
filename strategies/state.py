"""What the server carries from round to round: one value, which a checkpoint saves as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedssl.arrays import Layers

GLOBAL = "global"  # name of the model where there is only one


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """One global model.

    Attributes
    ----------
    layers : Layers
        All that clients exchange.
    broadcast : Layers
        What the method's server side made for clients of this model; see `fedssl.methods.base.SSLMethod`.
    strategy_state : dict
        What the algorithm remembers: numbers, words, arrays and dictionaries of them.
    server_optimizer_state : dict of str to Layers
        What the server optimiser remembers.
    phase : int
        The phase of the schedule that its layers have come to, from 1.
    num_updates : int
        Rounds in which clients' updates went into it.
    """

    layers: Layers
    broadcast: Layers = field(default_factory=dict)
    strategy_state: dict[str, Any] = field(default_factory=dict)
    server_optimizer_state: dict[str, Layers] = field(default_factory=dict)
    phase: int = 1
    num_updates: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The server after a round.

    Attributes
    ----------
    round : int
        The round; 0 before the first.
    models : mapping of str to GlobalModel
        By name. A model comes into being with the first update that goes into it.
    last_participation : mapping of int to (int, str)
        For a client whose last update was used: the round of that update, and the model it had started from.
    strategy_state : dict
        What the algorithm remembers beside what it remembers of each model: numbers, words, arrays and dictionaries
        of them.
    """

    round: int = 0
    models: Mapping[str, GlobalModel] = field(default_factory=dict)
    last_participation: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    strategy_state: dict[str, Any] = field(default_factory=dict)

    def model_names(self) -> list[str]:
        """Names of the models, client 2 before client 10."""
        return sorted(self.models, key=lambda name: (len(name), name))

    def with_models(self, names: Sequence[str]) -> "ServerState":
        """The state in which all these models exist: as copies of the first of them, if it does."""
        first = self.models.get(names[0]) if names else None
        return self if first is None else replace(self, models={**dict.fromkeys(names, first), **self.models})

    def last_round(self, client: int, model: str) -> int | None:
        """The round of the client's last update, if that was used and had started from this model."""
        round, start = self.last_participation.get(client, (None, None))
        return round if start == model else None


def model_suffix(name: str) -> str:
    """What stands behind a word that is said of this model: nothing if it is the only one."""
    return "" if name == GLOBAL else f"-{name}"
