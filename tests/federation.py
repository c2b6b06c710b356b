"""A federation on digits that is small enough for tests and keeps all its messages."""

from collections.abc import Iterable
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from client_app.app import app as client_app
from fedssl.arrays import Layers
from fedssl.config.load import compose
from server_app.build import build_run
from server_app.exchanges.base import in_client_order
from server_app.messaging import no_activity
from server_app.round import Round
from server_app.round_aggregation import UpdateObserver
from server_app.training_loop import run_round
from server_app.updates import RoundResult
from simulation.grid import LocalGrid
from strategies.base import FedSSLStrategy
from strategies.run_context import RunContext
from strategies.types import GLOBAL, GlobalModel, ServerState

TINY = ["num_clients=3", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1", "partition=iid"]
TINY += ["final_evaluation=none"]  # two images of a class are not enough for all protocols


class Federation:
    """Rounds of the unchanged apps on the local engine, without a run folder."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.settings = compose([*TINY, f"output_dir={folder}", *overrides])
        self.plans, self.updates = [], []
        app = ClientApp()

        @app.query("node_info")
        def who(message, context):
            return client_app(message, context)

        @app.train("personalized")
        def personalized(message, context):
            return client_app(message, context)

        @app.train()
        def train(message, context):
            self.plans.append(message.content)
            reply = client_app(message, context)
            assert not reply.has_error(), reply.error.reason
            self.updates.append(reply.content)
            return reply

        self.grid = LocalGrid(app, num_clients=self.settings.num_clients)
        self.components = build_run(self.grid, self.settings)
        self.exchange = self.components.make_exchange(self.grid, no_activity)
        self.method = self.components.method
        self.state = ServerState()
        self.report: RoundResult | None = None

    @property
    def strategy(self) -> FedSSLStrategy:
        return self.components.federation.strategy

    def run(self, rounds: int, *observers: UpdateObserver) -> Layers:
        """So many rounds more; the layers of the only model."""
        for _ in range(rounds):
            here = self.components.federation
            self.state, self.report = run_round(self.exchange, lambda here=here: here, self.state, observers=observers)
        return self.layers

    @property
    def layers(self) -> Layers:
        """Of the only model, whatever round it is."""
        return model_of(self.components.context, self.state, GLOBAL).layers


def finish(one: Round, replies: Iterable[Message]) -> tuple[ServerState, RoundResult]:
    """End a round with these replies to its messages."""
    return one.finish(in_client_order(replies, one.sent))


def model_of(context: RunContext, state: ServerState, name: str) -> GlobalModel:
    """The named model after the rounds of the state; the untrained one, if nobody has trained it."""
    return context.advance_to_phase(state.models.get(name) or context.initial_model(), max(state.round, 1))
