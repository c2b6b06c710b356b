"""The exchange of secure aggregation: the server receives one sum of all updates and no single one."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from flwr.serverapp import Grid

from fedssl.arrays import NO_COSINES
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.wire.messages import ClientUpdate
from fedssl.wire.secure_aggregation import summed_size
from server_app.exchanges.base import Lost, Received, SentRound, Sum, TooFewUpdatesError
from server_app.exchanges.sums import SummedUpdate
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.messaging import ActivityHook, no_activity
from server_app.secagg_round import SecureMean, TooFewParticipants
from server_app.secure_aggregation import apply_delta, max_weight_of, privacy_parameters, secure_mean_delta
from server_app.updates import RoundResult
from strategies.types import GLOBAL
from strategies.weighted_sum import PartialSum, WeightedSum


class LocalSum:
    """A sum with a weight of 1: clients have weighted their updates themselves."""

    def __init__(self, block: PartialSum) -> None:
        self._block = block

    def get(self) -> PartialSum:
        return self._block


class SecureExchange(WallClockExchange):
    """Exchange by SecAgg+. ``policy.deadline`` is that of each phase."""

    def __init__(
        self, grid: Grid, settings: SecureAggregationSettings, *, on_activity: ActivityHook = no_activity
    ) -> None:
        super().__init__(grid, on_activity=on_activity)
        self._settings = settings

    def replies(self, sent: SentRound) -> Iterator[Received]:
        start = sent.starts[GLOBAL].expected_upload
        self._max_weight = max_weight_of(self._settings, sent.aggregators[GLOBAL])
        try:
            self._mean = secure_mean_delta(
                self,
                {message.metadata.dst_node_id: message.content for message in sent.messages},
                self._settings,
                length=summed_size(start.layers),
                round=sent.round,
                timeout=sent.timeout,
                deadline=sent.policy.deadline,
                max_weight=self._max_weight,
            )
            layers = apply_delta(start.layers, self._mean.delta)
        except TooFewParticipants as reason:
            raise TooFewUpdatesError(f"round {sent.round}: {reason}") from reason
        for node, dropped in self._mean.dropped.items():
            yield Lost(sent.clients[node], dropped)
        self._bytes_down = {sent.clients[node]: self._mean.bytes_down[node] for node in self._mean.nodes}
        total = WeightedSum()
        total.start(start)
        total.add_weighted(ClientUpdate(layers=layers, partition_id=0), 1.0)
        updates = {
            sent.clients[node]: SummedUpdate(
                ClientUpdate(layers={}, partition_id=sent.clients[node]), NO_COSINES, self._mean.bytes_up[node]
            )
            for node in self._mean.nodes
        }
        yield Sum(LocalSum(total.take_block()), updates)

    def record(self, result: RoundResult) -> RoundResult:
        """Return the result with the bytes of all phases, and what secure aggregation guarantees and costs."""
        mean: SecureMean = self._mean
        result.features["secure_aggregation"] = {
            **privacy_parameters(self._settings, mean.graph, max_weight=self._max_weight),
            "phases": {name: asdict(cost) for name, cost in mean.phases.items()},
        }
        clients = [replace(row, bytes_down=self._bytes_down[row.client]) for row in result.clients]
        return replace(result, clients=clients)
