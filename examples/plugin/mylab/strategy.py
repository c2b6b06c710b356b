"""Two teams: clients with an even number share one model, those with an odd number another; at times they all mix."""

from fedssl.errors import InputError
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.interfaces import ServerState
from strategies.weighted_sum import WeightedSum

TEAMS = ("even", "odd")
"""Names of the two models."""


class Teams(ServerStrategy):
    """The server side: whose update goes into which model."""

    def __init__(self, *, mix_every: int) -> None:
        super().__init__(WeightedSum)
        self._mix_every = mix_every

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        return TEAMS[client % 2]

    def destination_models(self, state: ServerState, round: int, client: int, start: str) -> tuple[str, ...]:
        mix = self._mix_every > 0 and round % self._mix_every == 0
        return TEAMS if mix else (start,)


class TwoTeams(FedSSLStrategy):
    """Two models instead of one.

    Parameters
    ----------
    mix_every : int
        Rounds from one in which every update goes into both models to the next; 0: the teams never mix.

    Raises
    ------
    InputError
        ``mix_every`` is negative.
    """

    def __init__(self, *, mix_every: int) -> None:
        if mix_every < 0:
            raise InputError(f"strategy.mix_every={mix_every} must not be negative; 0 keeps the teams apart")
        super().__init__(Teams(mix_every=mix_every))
