"""The exchange of secure aggregation: the server receives one sum of all updates and no single one."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from flwr.serverapp import Grid

from fedssl.arrays import NO_COSINES
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.config.constraint_table import MIN_IMAGES
from fedssl.config.settings import Settings
from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.logs import log
from fedssl.rules import Problem, Rule
from fedssl.secure_aggregation.graph import (
    SharingGraph,
    check_limits,
    describe_graph,
    graph_for,
    privacy_parameters,
    proposed_parameters,
)
from fedssl.secure_aggregation.masks import SEED_BITS
from fedssl.secure_aggregation.protocol import (
    MAX_CLIENTS,
    MAX_WEIGHT,
    MIN_CLIENTS,
    TARGET_RANGE,
    UNIFORM_WEIGHT,
    apply_delta,
    summed_size,
)
from fedssl.secure_aggregation.server import SecureMean, TooFewParticipants, secure_mean_delta
from fedssl.wire.messages import ClientUpdate
from server_app.exchanges.base import Lost, Received, SentRound, Sum, TooFewUpdatesError
from server_app.exchanges.sums import SummedUpdate
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.messaging import ActivityHook, no_activity
from server_app.updates import RoundResult
from strategies.base import FedSSLStrategy
from strategies.mods.products import needs_sums_of_layers
from strategies.rules import RoundExchange, RunParts, needs_full_exchange, rounds_to_repeat, sum_problem
from strategies.types import GLOBAL, Aggregator
from strategies.weighted_sum import PartialSum, WeightedSum

SETTING = "secure_aggregation=secagg_plus"
MIN_MEAN_WEIGHT = 1 / 64  # of clients, relative to the largest: with the default range, steps of 2.4e-4
GUARANTEE = "secure_aggregation"  # key of what it guarantees, in the lines of rounds and in the summary


class LocalSum:
    """A sum with a weight of 1: clients have weighted their updates themselves."""

    def __init__(self, block: PartialSum) -> None:
        self._block = block

    def get(self) -> PartialSum:
        return self._block


class SecureExchange(WallClockExchange):
    """Exchange by SecAgg+. ``policy.deadline`` is that of each phase."""

    without = "secure_aggregation=none"

    def __init__(
        self, grid: Grid, settings: SecureAggregationSettings, *, on_activity: ActivityHook = no_activity
    ) -> None:
        super().__init__(grid, on_activity=on_activity)
        self._settings, self._has_warned = settings, False

    @classmethod
    def of(cls, grid: Grid, settings: Settings, *, on_activity: ActivityHook) -> "SecureExchange | None":
        """Return the exchange of a run with secure aggregation, else None."""
        secure = settings.secure_aggregation
        return None if secure is None else cls(grid, secure, on_activity=on_activity)

    def replies(self, sent: SentRound) -> Iterator[Received]:
        start = sent.starts[GLOBAL].expected_upload
        self._max_weight = max_weight_of(self._settings, sent.aggregators[GLOBAL])
        try:
            self._mean = secure_mean_delta(
                partial(self.send_and_receive, timeout=sent.timeout, deadline=sent.policy.deadline),
                {message.metadata.dst_node_id: message.content for message in sent.messages},
                self._settings,
                length=summed_size(start.layers),
                round=sent.round,
                max_weight=self._max_weight,
                min_clients=sent.policy.min_updates,
            )
        except TooFewParticipants as reason:
            by_client = {sent.clients[node]: problem for node, problem in reason.dropped.items()}
            raise TooFewUpdatesError(f"round {sent.round}: {reason}", dropped=by_client) from reason
        self._warn_of_steps(self._mean.mean_weight)
        layers = apply_delta(start.layers, self._mean.delta)
        for node, problem in self._mean.unused_shares.items():
            log.warning("round %d: the shares of client %d are not used: %s", sent.round, sent.clients[node], problem)
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
        result.features[GUARANTEE] = {
            **privacy_parameters(self._settings, mean.graph, max_weight=self._max_weight),
            "phases": {name: cost.line() for name, cost in mean.phases.items()},
        }
        clients = [replace(row, bytes_down=self._bytes_down[row.client]) for row in result.clients]
        return replace(result, clients=clients)

    def _warn_of_steps(self, mean_weight: float) -> None:
        """Log once if clients have far less than the largest weight: updates are rounded to steps of that."""
        if mean_weight < MIN_MEAN_WEIGHT and not self._has_warned:
            self._has_warned = True
            step = 2 * self._settings.clipping_range / (TARGET_RANGE * mean_weight)
            log.warning(
                "clients have %.0f images on average, far fewer than secure_aggregation.max_weight=%d, so that changes "
                "of weights are rounded to multiples of %.1g; set it to the number of images of the largest client",
                *(mean_weight * self._max_weight, self._max_weight, step),
            )


def weights_by_examples(aggregator: Aggregator) -> bool:
    """Return whether a sum weights clients by their numbers of images, which are then masked as well."""
    return isinstance(aggregator, WeightedSum) and aggregator.weighting == "examples"


def max_weight_of(settings: SecureAggregationSettings, aggregator: Aggregator) -> int:
    """Return the largest weight of a client in a round with this aggregator; `UNIFORM_WEIGHT`: all are equal."""
    if not weights_by_examples(aggregator):
        return UNIFORM_WEIGHT
    assert settings.max_weight is not None, "the settings of a run have the largest weight"
    return settings.max_weight


def largest_weight(settings: SecureAggregationSettings, *, max_examples: int | None, images: int | None) -> int:
    """Return the largest number of images that a client may have as its weight.

    ``images`` are those of the largest client, None if clients are devices. Raises `InputError` if nothing limits them.
    """
    if settings.max_weight is not None and images is not None and settings.max_weight < images:
        raise InputError(
            f"secure_aggregation.max_weight={settings.max_weight} but the largest client has {images} images, which "
            f"are its weight; set it to {images} or more, or to null"
        )
    limits = [limit for limit in (settings.max_weight, max_examples) if limit is not None] or [images or 0]
    if limits == [0]:
        raise InputError(
            "secure_aggregation.max_weight=null but the weight of a device, its number of images, is masked; set "
            "secure_aggregation.max_weight to the number of images of the largest device, or strategy.weighting=uniform"
        )
    return min(max(min(limits), MIN_IMAGES), MAX_WEIGHT)


def with_largest_weight(settings: Settings, strategy: FedSSLStrategy, *, images: Iterable[int] | None) -> Settings:
    """Return the settings with the largest weight of a client, and log what secure aggregation guarantees.

    ``images`` are the numbers of images of clients that train; None if clients are devices.
    """
    secure = settings.secure_aggregation
    if secure is None:
        return settings
    if any(weights_by_examples(strategy.server.aggregator(round)) for round in (1, settings.rounds)):
        largest = None if images is None else max(images)
        max_examples = settings.aggregation.max_examples
        secure = replace(secure, max_weight=largest_weight(secure, max_examples=max_examples, images=largest))
        log.info(
            "secure aggregation weights clients by their numbers of images, at most %d, and reveals the sum of these",
            secure.max_weight,
        )
    graph = graph_for(secure, settings.clients_per_round)
    log.info(describe_graph(secure, graph))
    if images is None and (reason := refusal_of_devices(secure, graph)):
        log.warning("devices whose limits.yaml allows no less refuse to train: %s", reason)
    return replace(settings, secure_aggregation=secure)


def refusal_of_devices(settings: SecureAggregationSettings, graph: SharingGraph) -> str | None:
    """Return the reason for which devices with the default limits refuse the graph; None if they accept it."""
    try:
        check_limits(proposed_parameters(settings, graph), Limits())
    except RequestRefused as reason:
        return str(reason)
    return None


def single_updates_stay_secret(settings: Settings) -> Problem:
    """Refuse what needs single updates, and snapshots, which have the models of single clients."""
    aggregation = settings.aggregation
    if settings.secure_aggregation is None:
        return None
    if settings.privacy or aggregation.buffered or aggregation.max_norm_ratio is not None:
        return (
            "secure_aggregation=secagg_plus reveals only the sum of updates; set privacy=none "
            "aggregation.buffered=false aggregation.max_norm_ratio=null, which need single updates"
        )
    if aggregation.over_selection:
        return (
            f"aggregation.over_selection={aggregation.over_selection} uses the first replies, but {SETTING} sums those "
            "of all sampled clients; set aggregation.over_selection=0, or more clients_per_round in its place"
        )
    if settings.recording.snapshot_every:
        return "secure_aggregation=secagg_plus reveals no client's model; set snapshot_every=0"
    return None


def graph_protects_updates(settings: Settings) -> Problem:
    """Require a graph of neighbors that protects the updates of this number of clients."""
    secure, clients = settings.secure_aggregation, settings.clients_per_round
    if secure is None:
        return None
    if clients > MAX_CLIENTS:
        return (
            f"secure aggregation of {clients} clients is not possible: the sum of more than {MAX_CLIENTS} quantized "
            "updates exceeds 2^32; lower clients_per_round"
        )
    if SEED_BITS[secure.mask_generator] < secure.security_bits:
        return (
            f"secure_aggregation.mask_generator={secure.mask_generator} has {SEED_BITS[secure.mask_generator]} "
            f"security bits, but secure_aggregation.security_bits={secure.security_bits:g}; lower it, or set "
            "secure_aggregation.mask_generator=chacha20"
        )
    if clients < MIN_CLIENTS:
        return (
            f"clients_per_round={clients} but secure aggregation needs at least {MIN_CLIENTS} clients, because each of "
            "two can compute the update of the other; raise it, or set secure_aggregation=none"
        )
    if secure.neighbors is not None and secure.neighbors >= clients:
        return (
            f"secure_aggregation.neighbors={secure.neighbors} but {clients} clients per round have {clients - 1} "
            "others each; lower it, or set it to null"
        )
    try:
        graph_for(secure, clients)
    except InputError as problem:
        return str(problem)
    return None


def updates_are_summed(parts: RunParts) -> Problem:
    """Require updates that are sums of layers, and wall-clock time: virtual time models one message per round."""
    if not parts.settings.secure_aggregation:
        return None
    problem = needs_sums_of_layers(SETTING, parts) or sum_problem(SETTING, parts, weightings=("uniform", "examples"))
    if problem or parts.settings.recording.choices.get("client_speed") == "none":
        return problem
    return (
        f"{SETTING} sends four messages per client and round, which virtual time does not model; set client_speed=none"
    )


def attempts_leave_no_state(parts: RunParts) -> Problem:
    """Refuse retries if the strategy counts client states: an attempt may fail after its clients have saved theirs."""
    retries, strategy = parts.settings.aggregation.max_retries, parts.strategy.server
    if not (parts.settings.secure_aggregation and retries and strategy.counts_client_states):
        return None
    return (
        f"{SETTING} may repeat a round whose clients have saved states that strategy="
        f"{parts.settings.recording.choices['strategy']} counts once; set aggregation.max_retries=0"
    )


def sums_are_revealed_once(parts: RunParts) -> Problem:
    """Require a checkpoint of each round: a resumed run repeats others, and two sums may differ by one client."""
    repeated = rounds_to_repeat(parts)
    if not (parts.settings.secure_aggregation and repeated):
        return None
    return (
        f"{SETTING} reveals one sum per round, but with checkpoint_every={repeated + 1} a resumed run repeats up to "
        f"{repeated} rounds, and two sums with the same model reveal the update of a client that is in one of them; "
        "set checkpoint_every=1"
    )


def cost_has_one_message(settings: Settings) -> Problem:
    """Refuse an estimate of the cost, which counts one message per client and round."""
    if settings.secure_aggregation is None:
        return None
    return "plan=true cannot estimate the messages of secure_aggregation; set secure_aggregation=none"


def round_rules(settings: Settings) -> tuple[Rule[RoundExchange], ...]:
    """Return the rules about what the clients of a round exchange."""
    return () if settings.secure_aggregation is None else (needs_full_exchange(SETTING),)


SETTINGS_RULES = (single_updates_stay_secret, graph_protects_updates)
RUN_RULES = (updates_are_summed, attempts_leave_no_state, sums_are_revealed_once)
COST_RULES = (cost_has_one_message,)
