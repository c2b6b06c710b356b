"""Context of all rounds of a run: clients, algorithm, phases, and the steps of the server."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from fedssl.arrays import GlobalLayers, Layers
from fedssl.config.aggregation_settings import AggregationSettings, SecureAggregationSettings
from fedssl.config.settings import LOSSLESS
from fedssl.errors import InputError
from fedssl.low_rank_products import FactorPairs, cut_factors
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import copy_layers, factor_pairs, names_in_parts
from fedssl.schedule.phases import Phase, phase_at
from fedssl.schedule.stages import Stages
from fedssl.seeding import numpy_generator
from fedssl.wire.messages import CLIENT_METRICS
from server_app.differential_privacy import Privacy
from strategies.base import FedSSLStrategy
from strategies.low_rank_aggregation import REPLACING_FACTORS
from strategies.server_optimizer import NoServerOptimizer, ServerOptimizer
from strategies.types import GlobalModel
from strategies.update_store import UpdateStorage


class Calibrator(Protocol):
    """Training on the server itself, on auxiliary images; ``when`` is "start" or "end" of every round."""

    when: str

    def __call__(self, round: int, layers: Layers) -> Layers: ...


def raise_no_server_images(layers: Layers) -> Tensor:
    """Raise the error of a server without images."""
    raise InputError("the server has no images to compare models with; set a data set of the server")


def no_flops(phase: Phase, client: int) -> float:
    """Return 0: FLOPs are not measured."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """Context of all rounds of a run."""

    strategy: FedSSLStrategy
    method: SSLMethod
    phases: Sequence[Phase]
    initial_arrays: Callable[[], Layers]  # returns the untrained layers of a new model
    nodes: Mapping[int, int]  # node ids by client id, which in a simulation is a partition id
    seed: int
    clients_per_round: int
    timeout: float  # seconds without a reply after which missing clients are dropped
    client_config: str
    code_fingerprint: str
    metrics: tuple[str, ...] = ()  # that clients report besides those of the aggregator; they report nothing else
    server_optimizer: ServerOptimizer = field(default_factory=NoServerOptimizer)
    lr_factor: Callable[[int], float] = lambda round: 1.0  # factor of the clients' learning rate in a round
    calibration: Calibrator | None = None
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    privacy: Privacy | None = None
    secure_aggregation: SecureAggregationSettings | None = None
    low_rank_aggregation: str = "factors"  # of LoRA's products, see `strategies.low_rank_aggregation`
    client_ranks: Sequence[int] = ()  # client k has the one of number k modulo their number; empty: that of the model
    max_ranks: Mapping[int, int] = field(default_factory=dict)  # of the clients that have a limit
    wire_dtype: str = LOSSLESS
    # Returns features of the server's images under a model, for strategies that compare models.
    extract_features: Callable[[Layers], Tensor] = raise_no_server_images
    update_storage: Callable[[], UpdateStorage] = UpdateStorage  # returns that of one round
    base: Layers = field(default_factory=dict)  # base layers, which clients receive once, see `fedssl.base_layers`
    base_digest: str = ""  # of these; empty if there are none
    base_holders: frozenset[int] = frozenset()  # clients that have the base layers before their first participation
    untrained_clients: frozenset[int] = frozenset()  # they never train: unseen ones, and those with too few images
    offline_clients: frozenset[int] = frozenset()  # in virtual time, at the start of the round
    client_flops: Callable[[Phase, int], float] = no_flops  # of a client's round, for virtual time

    def __post_init__(self) -> None:
        check_metrics(self.metrics)

    @cached_property
    def clients(self) -> Mapping[int, int]:
        """Return the client ids by node id."""
        return {node: client for client, node in self.nodes.items()}

    @cached_property
    def _trained_clients(self) -> np.ndarray:
        """Return the ids of all clients that may train, ascending, int64."""
        client_ids = np.fromiter(self.nodes, np.int64, len(self.nodes))
        return _without(np.sort(client_ids), self.untrained_clients)

    @cached_property
    def stages(self) -> Stages:
        return Stages(self.method)

    @cached_property
    def gathered(self) -> GlobalLayers:
        """Return the names, shapes and dtypes of the parts that clients upload to the method's server side."""
        return GlobalLayers(self._copied(self.method.uploaded_parts))

    @cached_property
    def factor_pairs(self) -> FactorPairs:
        """Return the pairs of LoRA's factors."""
        return factor_pairs(self.method)

    def rank_of(self, client: int) -> int | None:
        """Return the rank of the factors that a client exchanges; None if it is that of the model.

        A client's limit has no effect on an aggregation that combines factors: it refuses a plan of a larger rank.
        """
        ranks, limit = self.client_ranks, self.max_ranks.get(client)
        rank = ranks[client % len(ranks)] if ranks else None
        if limit is None or self.low_rank_aggregation not in REPLACING_FACTORS:
            return rank
        return min(limit, rank or self._model_rank)

    @cached_property
    def _model_rank(self) -> int:
        return len(self.method.named_tensors[self.method.low_rank_layers[0].a])

    def with_rank(self, layers: Layers, rank: int | None) -> Layers:
        """Return layers as a client of this rank exchanges them."""
        return layers if rank is None else cut_factors(layers, self.factor_pairs.layers, rank)

    @property
    def clients_cache_frozen(self) -> bool:
        """Return whether clients may cache frozen stages. Calibration would change them."""
        return len(self.phases) > 1 and self.calibration is None

    def initial_model(self) -> GlobalModel:
        return GlobalModel(layers=self.initial_arrays(), broadcast=self._copied(self.method.broadcast_parts))

    def _copied(self, parts: tuple[str, ...]) -> Layers:
        return copy_layers(self.method, names_in_parts(self.method, parts))

    def advance_to_phase(self, model: GlobalModel, round: int) -> GlobalModel:
        """Return the model at the start of a round, after all phase changes since its last training."""
        phase = phase_at(self.phases, round)
        layers = model.layers
        for later in self.phases[model.phase : phase.number]:
            layers = self.stages.transfer_weights(layers, later)
        return replace(model, layers=layers, phase=phase.number)

    def calibrate_if_due(self, model: GlobalModel, round: int, *, when: str) -> GlobalModel:
        """Return the model, calibrated if a calibration is due at the start or end of a round."""
        if self.calibration is None or self.calibration.when != when:
            return model
        return replace(model, layers=self.calibration(round, model.layers))

    def sample(self, round: int, *, attempt: int = 0, in_flight: Collection[int] = ()) -> list[int]:
        """Return the ids of the clients that train in a round, ascending.

        ``clients_per_round`` and ``aggregation.over_selection`` of the available clients are sampled, less those
        ``in_flight`` with an older plan. Another attempt samples other clients.
        """
        client_ids = _without(self._trained_clients, {*in_flight, *self.offline_clients})
        num_wanted = self.clients_per_round + self.aggregation.over_selection - len(in_flight)
        indices = sample_clients(
            self.seed,
            round,
            num_clients=len(client_ids),
            clients_per_round=max(min(num_wanted, len(client_ids)), 0),
            attempt=attempt,
        )
        return [int(client_ids[index]) for index in indices]

    def requested_metrics(self, round: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.strategy.server.aggregator(round).required_metrics, *self.metrics]))


def _without(client_ids: np.ndarray, excluded: Collection[int]) -> np.ndarray:
    """Return the ids that are not among ``excluded``, in their order."""
    return client_ids[np.isin(client_ids, list(excluded), invert=True)] if excluded else client_ids


def check_metrics(metrics: Iterable[str]) -> None:
    """Refuse unknown metrics; raises `InputError`."""
    unknown = [name for name in metrics if name not in CLIENT_METRICS]
    if unknown:
        raise InputError(f"strategy.reported_metrics has {', '.join(unknown)}; allowed are {', '.join(CLIENT_METRICS)}")


def sample_clients(seed: int, round: int, *, num_clients: int, clients_per_round: int, attempt: int = 0) -> list[int]:
    """Return the indices of the clients that train, ascending: a pure function of seed, round and attempt."""
    seed_path = ("clients", round, attempt) if attempt else ("clients", round)
    chosen = numpy_generator(seed, *seed_path).choice(num_clients, size=clients_per_round, replace=False)
    return sorted(int(client) for client in chosen)
