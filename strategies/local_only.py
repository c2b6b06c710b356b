"""Every client alone: nothing is combined, the natural lower bound of a federation.

Clients train as under any other strategy, from the same initial model, as often and as long, but every client has a
global model of its own, into which nobody else's updates go. Every client's model is evaluated by itself, and results
are means over the clients that have taken part.

The server holds a model for every client that has taken part, and in a round the new ones of its clients as well.
"""

from fedssl.errors import InputError
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.interfaces import ServerState, StrategyContext
from strategies.weighted_sum import WeightedSum


class LocalOnlyServer(ServerStrategy):
    """A server with a model per client; the mean of one client's update is the update."""

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        return str(client)

    def validate(self, context: StrategyContext) -> None:
        if context.has_calibration:
            raise InputError(
                "calibration=auxiliary trains the model that clients share, but with strategy=local_only they share "
                "none; set calibration=none"
            )
        if context.server_optimizer:
            raise InputError(
                "server_optimizer takes steps with the model that clients share, but with strategy=local_only they "
                "share none; set server_optimizer=none"
            )


class LocalOnly(FedSSLStrategy):
    """Clients that train alone."""

    def __init__(self) -> None:
        super().__init__(LocalOnlyServer(WeightedSum))
