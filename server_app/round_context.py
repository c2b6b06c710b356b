"""What is the same in all rounds of a run: who takes part, the algorithm, the phases, and what the server adds."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from torch import Tensor

from fedssl.arrays import Layers, ReferenceLayers
from fedssl.config.aggregation_settings import AggregationSettings, SecureAggregationSettings
from fedssl.config.settings import LOSSLESS
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import copy_layers, names_in_parts
from fedssl.schedule.phases import Phase, phase_at
from fedssl.schedule.stages import Stages
from fedssl.seeding import numpy_generator
from fedssl.wire.messages import CLIENT_METRICS
from server_app.differential_privacy import Privacy
from strategies.base import FedSSLStrategy
from strategies.server_optimizer import NoServerOptimizer, ServerOptimizer
from strategies.state import GlobalModel


class Calibrator(Protocol):
    """Training on the server itself, on auxiliary images; ``when`` is "start" or "end" of every round."""

    when: str

    def __call__(self, round: int, layers: Layers) -> Layers: ...


def raise_no_server_images(layers: Layers) -> Tensor:
    """What stands for a server without images."""
    raise InputError("the server has no images to compare models with; name a data set of its own")


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """What is the same in all rounds of a run.

    Attributes
    ----------
    strategy : FedSSLStrategy
    method : SSLMethod
        Tells what is exchanged; its server side is asked.
    phases : sequence of Phase
        They cover all rounds.
    initial_arrays : callable
        Makes the untrained layers, from which a model begins that does not exist yet.
    nodes : mapping of int to int
        Node ids by the numbers of the clients, which are partition ids in a simulation.
    unseen_clients : frozenset of int
        Clients that never train.
    seed, clients_per_round : int
    timeout : float
        Seconds without a reply after which a round goes on without the clients that are missing.
    client_config, code_fingerprint : str
        For `TrainPlan`.
    metrics : tuple of str
        What clients report for the log beside what the rule needs. Nothing else leaves them.
    server_optimizer : ServerOptimizer
    lr_factor : callable
        Maps a round to the factor of the clients' learning rate.
    calibration : Calibrator or None
    aggregation : AggregationSettings
        What is taken from clients, and how long it is waited for.
    privacy : Privacy or None
        None: the model is released as the rule made it.
    secure_aggregation : SecureAggregationSettings or None
        None: the server sees every update.
    wire_dtype : str
        How layers travel, see `fedssl.wire.wire_format`.
    extract_features : callable
        What a model with these layers makes of images of the server's own, for server strategies that compare models.

    Raises
    ------
    InputError
        There is no metric of that name.
    """

    strategy: FedSSLStrategy
    method: SSLMethod
    phases: Sequence[Phase]
    initial_arrays: Callable[[], Layers]
    nodes: Mapping[int, int]
    seed: int
    clients_per_round: int
    timeout: float
    client_config: str
    code_fingerprint: str
    metrics: tuple[str, ...] = ()
    server_optimizer: ServerOptimizer = field(default_factory=NoServerOptimizer)
    lr_factor: Callable[[int], float] = lambda round: 1.0
    calibration: Calibrator | None = None
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    privacy: Privacy | None = None
    secure_aggregation: SecureAggregationSettings | None = None
    wire_dtype: str = LOSSLESS
    extract_features: Callable[[Layers], Tensor] = raise_no_server_images
    unseen_clients: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_metrics(self.metrics)

    @cached_property
    def stages(self) -> Stages:
        """The stages of the encoder by the names of their layers."""
        return Stages(self.method)

    @cached_property
    def gathered(self) -> ReferenceLayers:
        """What a client's part for the method's server side must be like."""
        return ReferenceLayers(self._copied(self.method.uploaded_parts))

    @property
    def clients_cache_frozen(self) -> bool:
        """Whether what clients receive of frozen stages stays valid: calibration would change it."""
        return len(self.phases) > 1 and self.calibration is None

    def initial_model(self) -> GlobalModel:
        """The model that nobody has trained yet."""
        return GlobalModel(layers=self.initial_arrays(), broadcast=self._copied(self.method.broadcast_parts))

    def _copied(self, parts: tuple[str, ...]) -> Layers:
        return copy_layers(self.method, names_in_parts(self.method, parts))

    def advance_to_phase(self, model: GlobalModel, round: int) -> GlobalModel:
        """The model as a round begins with it, brought through all phases since it was trained last."""
        phase = phase_at(self.phases, round)
        layers = model.layers
        for later in self.phases[model.phase : phase.number]:
            layers = self.stages.transfer_weights(layers, later)
        return replace(model, layers=layers, phase=phase.number)

    def calibrate_if_due(self, model: GlobalModel, round: int, *, when: str) -> GlobalModel:
        """The model, trained by the server if its calibration is due at the start or end of a round."""
        if self.calibration is None or self.calibration.when != when:
            return model
        return replace(model, layers=self.calibration(round, model.layers))

    def sample(self, round: int, *, attempt: int = 0, in_flight: Collection[int] = ()) -> list[int]:
        """Numbers of the clients that are asked in a round, ascending.

        Of those that are there as many as are to train in a round, and ``aggregation.over_selection`` more; those
        that are ``in_flight`` with an older plan count, and are not asked. Another attempt asks others.
        """
        client_ids = sorted(self.nodes.keys() - in_flight - self.unseen_clients)
        num_wanted = self.clients_per_round + self.aggregation.over_selection - len(in_flight)
        indices = sample_clients(
            self.seed,
            round,
            num_clients=len(client_ids),
            clients_per_round=max(min(num_wanted, len(client_ids)), 0),
            attempt=attempt,
        )
        return [client_ids[index] for index in indices]

    def requested_metrics(self, round: int) -> tuple[str, ...]:
        """Metrics that clients report in a round."""
        return tuple(dict.fromkeys([*self.strategy.server.aggregator(round).required_metrics, *self.metrics]))


def check_metrics(metrics: Iterable[str]) -> None:
    """Refuse names of metrics that clients do not know; raises `InputError`."""
    unknown = [name for name in metrics if name not in CLIENT_METRICS]
    if unknown:
        raise InputError(f"strategy.reported_metrics has {', '.join(unknown)}; allowed are {', '.join(CLIENT_METRICS)}")


def sample_clients(seed: int, round: int, *, num_clients: int, clients_per_round: int, attempt: int = 0) -> list[int]:
    """Which of the clients train in a round, by place, ascending: a pure function of seed, round and attempt."""
    seed_path = ("clients", round, attempt) if attempt else ("clients", round)
    chosen = numpy_generator(seed, *seed_path).choice(num_clients, size=clients_per_round, replace=False)
    return sorted(int(client) for client in chosen)
