"""The federation of a run: its algorithm, its clients, and which of them train in a round."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.config.settings import Settings
from fedssl.errors import InputError
from fedssl.rules import Problem, Rule
from fedssl.schedule.phases import Phase
from fedssl.seeding import numpy_generator
from fedssl.wire.messages import CLIENT_METRICS
from server_app.nodes import ClientDirectory
from server_app.policies import LoopPolicy
from strategies.base import FedSSLStrategy
from strategies.mods.base import Mod
from strategies.rules import RoundExchange
from strategies.run_context import RunContext


def raise_no_server_images(layers: Layers) -> Tensor:
    """Raise the error of a server without images."""
    raise InputError("the server has no images to compare models with; set a data set of the server")


def no_flops(phase: Phase, client: int) -> float:
    """Return 0: FLOPs are not measured."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The algorithm of a run, the clients that are available, and the steps of the server."""

    context: RunContext
    strategy: FedSSLStrategy
    directory: ClientDirectory
    policy: LoopPolicy = field(default_factory=LoopPolicy)
    round_rules: Sequence[Rule[RoundExchange]] = ()  # about what the clients of a round exchange
    mods: Sequence[Mod] = ()  # in the order of their hooks
    # Returns features of the server's images under a model, for strategies that compare models.
    extract_features: Callable[[Layers], Tensor] = raise_no_server_images
    trains_new_devices: bool = False  # devices that join later train in every round as well
    client_flops: Callable[[Phase, int], float] = no_flops  # of a client's round, for virtual time

    @property
    def settings(self) -> Settings:
        return self.context.settings

    @property
    def nodes(self) -> Mapping[int, int]:
        return self.directory.nodes

    @property
    def untrained_clients(self) -> frozenset[int]:
        return self.context.untrained_clients

    @property
    def clients_per_round(self) -> int:
        return len(self.nodes) if self.trains_new_devices else self.context.clients_per_round

    @cached_property
    def clients(self) -> Mapping[int, int]:
        return {node: client for client, node in self.nodes.items()}

    @cached_property
    def _trained_clients(self) -> np.ndarray:
        """Return the ids of all clients that may train, ascending, int64."""
        client_ids = np.fromiter(self.nodes, np.int64, len(self.nodes))
        return _without(np.sort(client_ids), self.untrained_clients)

    @cached_property
    def num_trained_clients(self) -> int:
        """Return the number of clients that may train in some round, with devices that are not available now."""
        known = {*self.nodes, *self.directory.client_ids.values()}
        return len(known - self.untrained_clients)

    def without_training(self) -> "Federation":
        """Return the federation without mods that train models on the server."""
        return replace(self, mods=tuple(mod for mod in self.mods if not mod.trains))

    def sample(
        self, round: int, *, attempt: int = 0, in_flight: Collection[int] = (), offline: Collection[int] = ()
    ) -> list[int]:
        """Return the ids of the clients that train in a round, ascending.

        ``clients_per_round`` and the policy's extra ones are sampled, less those ``in_flight`` with an older plan, and
        none that is ``offline``. Another attempt samples other clients.
        """
        client_ids = _without(self._trained_clients, {*in_flight, *offline})
        num_wanted = self.num_wanted(in_flight)
        indices = sample_clients(
            self.settings.seed,
            round,
            num_clients=len(client_ids),
            clients_per_round=max(min(num_wanted, len(client_ids)), 0),
            attempt=attempt,
        )
        return [int(client_ids[index]) for index in indices]

    def available_clients(self, in_flight: Collection[int]) -> set[int]:
        return self.nodes.keys() - self.untrained_clients - set(in_flight)

    def num_wanted(self, in_flight: Collection[int]) -> int:
        """Return the number of clients that a round samples if enough are available."""
        return self.clients_per_round + self.policy.extra - len(in_flight)

    def requested_metrics(self, round: int) -> tuple[str, ...]:
        """Return the metrics that clients report: those of the aggregator, and others for the log.

        The aggregator of a later round, which may use the update, can require others (a warm-up has ended).
        """
        rounds = (round, self.settings.rounds) if self.policy.uses_late else (round,)
        required = [name for one in rounds for name in self.strategy.server.aggregator(one).required_metrics]
        return tuple(dict.fromkeys([*required, *self.settings.algorithm.reported_metrics]))


def _without(client_ids: np.ndarray, excluded: Collection[int]) -> np.ndarray:
    return client_ids[np.isin(client_ids, list(excluded), invert=True)] if excluded else client_ids


def metrics_are_known(settings: Settings) -> Problem:
    """Refuse unknown metrics."""
    unknown = [name for name in settings.algorithm.reported_metrics if name not in CLIENT_METRICS]
    if not unknown:
        return None
    return f"strategy.reported_metrics has {', '.join(unknown)}; allowed are {', '.join(CLIENT_METRICS)}"


def sample_clients(seed: int, round: int, *, num_clients: int, clients_per_round: int, attempt: int = 0) -> list[int]:
    """Return the indices of the clients that train, ascending: a pure function of seed, round and attempt."""
    seed_path = ("clients", round, attempt) if attempt else ("clients", round)
    chosen = numpy_generator(seed, *seed_path).choice(num_clients, size=clients_per_round, replace=False)
    return sorted(int(client) for client in chosen)


SETTINGS_RULES = (metrics_are_known,)
