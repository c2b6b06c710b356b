"""Every client trains alone. This is the natural lower bound of a federation.

Clients train as under any other strategy, from the same initial model, as often and as long, but every client has its
own global model, which no other update changes. Every client's model is evaluated separately, and results are means
over the clients that have participated.

The server stores a model for every client that has participated in a file. A round needs the memory of two models per
participant.
"""

from fedssl.rules import Problem
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.run_context import RunContext
from strategies.types import ServerState
from strategies.weighted_sum import WeightedSum


class LocalOnlyServer(ServerStrategy):
    """Server with a model per client. The mean of one client's update is the update."""

    models_per_client = True

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        return str(client)

    def problem(self, context: RunContext) -> Problem:
        return shared_training_problem(context, strategy="local_only")


def shared_training_problem(context: RunContext, *, strategy: str) -> Problem:
    """Return why no setting may train the model that clients share, where they share none."""
    for given, setting in (
        (context.settings.calibration is not None, "calibration=auxiliary"),
        (context.has_server_optimizer, "server_optimizer"),
    ):
        if given:
            return (
                f"{setting} works on a model that clients share, and with strategy={strategy} they share none; set "
                f"{setting.partition('=')[0]}=none"
            )
    return None


class LocalOnly(FedSSLStrategy):
    r"""Clients that train alone.

    $$
    w_k \leftarrow \operatorname{Train}(w_k; D_k) \qquad a = \frac{1}{K} \sum_k a(w_k)
    $$

    with $w_k$ the model of client k, $D_k$ its images, and a a result, averaged over clients.
    """

    def __init__(self) -> None:
        super().__init__(LocalOnlyServer(WeightedSum))
