"""The models from which the clients of a round start, and those to which their updates are added."""

from collections.abc import Sequence

from server_app.policies import LoopPolicy
from strategies.base import ServerStrategy
from strategies.types import ServerState


class Routes:
    """Routes of the updates of a round, which the server side of the strategy decides.

    ``clusters`` are the models among which updates are divided after all have arrived; usually there are none.
    ``candidates`` are the models from which each client selects its start, and ``models`` those that the round changes.
    """

    def __init__(
        self,
        server: ServerStrategy,
        state: ServerState,
        clients: Sequence[int],
        *,
        round: int,
        clusters: tuple[str, ...],
        policy: LoopPolicy,
    ) -> None:
        self._server, self._state, self._round, self._sampled = server, state, round, frozenset(clients)
        self.clusters = clusters
        self.candidates = {client: server.candidate_models(state, round, client) for client in clients}
        self.models = dict.fromkeys(self.clusters or policy.models)
        for client, names in self.candidates.items():
            self.models |= dict.fromkeys(into for name in names for into in self.destinations(client, name))

    def destinations(self, client: int, start: str) -> tuple[str, ...]:
        """Return the models that a client's update goes into; none if updates are clustered."""
        if self.clusters:
            return ()
        names = dict.fromkeys(self._server.destination_models(self._state, self._round, client, start))
        if self._server.models_per_client:  # a client that is not sampled keeps its model
            return tuple(name for name in names if int(name) in self._sampled)
        return tuple(names)
