"""Two teams: clients with even and odd ids share one model each. The models are mixed at intervals."""

from fedssl.errors import InputError
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.types import ServerState
from strategies.weighted_sum import WeightedSum

TEAMS = ("even", "odd")  # names of the models


class Teams(ServerStrategy):
    """Server side: selects the models that an update is added to."""

    def __init__(self, *, mix_every: int) -> None:
        super().__init__(WeightedSum)
        self._mix_every = mix_every

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        return TEAMS[client % 2]

    def destination_models(self, state: ServerState, round: int, client: int, start: str) -> tuple[str, ...]:
        mix = self._mix_every > 0 and round % self._mix_every == 0
        return TEAMS if mix else (start,)


class TwoTeams(FedSSLStrategy):
    """Two models. Every ``mix_every`` rounds all updates are added to both; 0 keeps the teams separate."""

    def __init__(self, *, mix_every: int) -> None:
        if mix_every < 0:
            raise InputError(
                f"strategy.mix_every={mix_every} must not be negative; set it to 0 to keep the teams separate"
            )
        super().__init__(Teams(mix_every=mix_every))
