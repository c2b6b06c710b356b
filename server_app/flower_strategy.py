"""Adapter of a fedssl strategy to Flower's `Strategy`, for a custom ServerApp, see `fedssl.compose`.

The ServerApp of fedssl runs the same rounds itself, because it also resumes, evaluates and records them.
"""

from collections.abc import Iterable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedssl.api import ServerParts
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.wire.records import arrays_to_record
from server_app.app import load_for_federation
from server_app.build import RunComponents, build_run
from server_app.exchanges.base import in_client_order
from server_app.federation import Federation
from server_app.messaging import no_activity
from server_app.round import Round
from server_app.statistics import with_statistics
from server_app.updates import RoundResult
from strategies.types import ServerState


def server_parts(grid: Grid, overrides: Sequence[str]) -> ServerParts:
    """Return what a ServerApp needs for a run with these overrides."""
    settings = load_for_federation(grid, overrides)
    components = build_run(grid, settings)
    check_loop(components, grid)
    federation = with_statistics(components, lambda: grid).federation
    start = arrays_to_record(federation.context.initial_model().layers)
    return ServerParts(FlowerStrategy(federation), start, settings.rounds)


def check_loop(components: RunComponents, grid: Grid) -> None:
    """Raise `InputError` for settings of the loop of fedssl's own ServerApp, which Flower's loop cannot fulfil."""
    policy, exchange = components.federation.policy, components.make_exchange(grid, no_activity)
    changes = {
        exchange.without: bool(exchange.without),
        "aggregation.buffered=false": policy.uses_late,
        "aggregation.over_selection=0": policy.extra > 0,
        "aggregation.round_deadline=null": policy.deadline is not None,
        "aggregation.max_retries=0": policy.max_retries > 0,
    }
    if needed := [setting for setting, is_needed in changes.items() if is_needed]:
        raise InputError(
            "Flower's loop sends one message per client and round, waits for all replies and repeats no round; set "
            f"{' '.join(needed)}, or use the ServerApp of fedssl"
        )


class FlowerStrategy(Strategy):
    """Rounds of a federation in Flower's loop.

    The state contains the models. The arrays that Flower passes are the layers of one of them, for its evaluation
    function and its result. They change nothing. ``state`` and ``result`` are those of the last round.
    """

    def __init__(self, federation: Federation, state: ServerState | None = None) -> None:
        self._federation = federation
        self.state = state or ServerState()
        self.result: RoundResult | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the next round; raises `InputError` after the last one."""
        rounds = self._federation.settings.rounds
        if self.state.round >= rounds:
            raise InputError(
                f"the run has {rounds} rounds, after which no learning rate is defined; set rounds to more"
            )
        # Nothing is resumed here, so clients need no states of earlier rounds.
        self._round = Round(self._federation, self.state, oldest_resumable=self.state.round)
        return self._round.messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the layers of the first model and the number of updates; raises `RunError` without any."""
        self.state, self.result = self._round.finish(in_client_order(replies, self._round.sent))
        del self._round  # it contains the models of the previous round
        first = self.state.models[self.state.model_names()[0]]
        return arrays_to_record(first.evaluated), MetricRecord({"clients": len(self.result.clients)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: models are evaluated on the server."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, see `configure_evaluate`."""
        return None

    def summary(self) -> None:
        log.info("strategy %s", type(self._federation.strategy).__name__)
