"""Wrappers of a server or client strategy that forward every hook. Subclasses override the hooks that they change."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedssl.arrays import Layers
from fedssl.methods.base import SSLMethod
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, ServerStrategy
from strategies.run_context import RunContext
from strategies.types import (
    GLOBAL,
    Aggregator,
    ClientState,
    CommunicationSummary,
    GlobalModel,
    LocalData,
    RoundOutcome,
    ServerState,
    TrainAgain,
)
from strategies.update_store import UpdateStore


class DelegatingServer(ServerStrategy):
    """Server strategy that forwards every hook to another one."""

    def __init__(self, base_strategy: ServerStrategy) -> None:
        self.base_strategy = base_strategy
        self.models_per_client = base_strategy.models_per_client
        self.num_comparison_images = base_strategy.num_comparison_images
        self.model_state_type = base_strategy.model_state_type
        self.strategy_state_type = base_strategy.strategy_state_type

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        return self.base_strategy.starting_model(state, round, client)

    def candidate_models(self, state: ServerState, round: int, client: int) -> tuple[str, ...]:
        return self.base_strategy.candidate_models(state, round, client)

    def destination_models(self, state: ServerState, round: int, client: int, start: str) -> tuple[str, ...]:
        return self.base_strategy.destination_models(state, round, client, start)

    def models_to_cluster(self, state: ServerState, round: int) -> tuple[str, ...]:
        return self.base_strategy.models_to_cluster(state, round)

    def assign_clusters(self, clients: Sequence[int], deltas: UpdateStore) -> Mapping[int, str]:
        return self.base_strategy.assign_clusters(clients, deltas)

    def upload_names(self, model: GlobalModel, round: int, layers: Layers) -> tuple[str, ...] | None:
        return self.base_strategy.upload_names(model, round, layers)

    def download_names(
        self, model: GlobalModel, round: int, layers: Layers, last: int | None
    ) -> tuple[str, ...] | None:
        return self.base_strategy.download_names(model, round, layers, last)

    def keeps_model(self, name: str, clients: Collection[int]) -> bool:
        return self.base_strategy.keeps_model(name, clients)

    def aggregator(self, round: int, name: str = GLOBAL) -> Aggregator:
        return self.base_strategy.aggregator(round, name)

    def after_aggregation(
        self,
        model: GlobalModel,
        round: int,
        layers: Layers,
        *,
        aggregator: Aggregator,
        received: Mapping[int, tuple[str, ...]],
    ) -> tuple[Any, dict[str, Any]]:
        return self.base_strategy.after_aggregation(model, round, layers, aggregator=aggregator, received=received)

    def on_round_end(self, state: ServerState, outcome: RoundOutcome) -> tuple[Any, dict[str, Any]]:
        return self.base_strategy.on_round_end(state, outcome)

    def validate(self, context: RunContext) -> None:
        self.base_strategy.validate(context)

    def plot(self, folder: Path) -> None:
        self.base_strategy.plot(folder)

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        return self.base_strategy.describe_communication(usual)


class DelegatingClient(ClientStrategy):
    """Client strategy that forwards every hook to another one."""

    def __init__(self, base_strategy: ClientStrategy) -> None:
        self.base_strategy = base_strategy
        self.trainings_per_round = base_strategy.trainings_per_round
        self.selects_by_state = base_strategy.selects_by_state
        self.starts_from_own_layers = base_strategy.starts_from_own_layers

    def select_model(
        self, method: SSLMethod, plans: Sequence[TrainPlan], state: ClientState | None, local_data: LocalData
    ) -> int:
        return self.base_strategy.select_model(method, plans, state, local_data)

    def load_start(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        return self.base_strategy.load_start(method, plan, state)

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        return self.base_strategy.state_to_save(method, plan, start=start, state=state)

    def train_personalized(
        self, method: SSLMethod, plan: TrainPlan, state: ClientState | None, *, train: TrainAgain
    ) -> ClientState:
        return self.base_strategy.train_personalized(method, plan, state, train=train)

    def personalized_model(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        return self.base_strategy.personalized_model(method, plan, state)

    def layers_to_upload(self, method: SSLMethod, plan: TrainPlan) -> Layers:
        return self.base_strategy.layers_to_upload(method, plan)

    def validate(self, context: RunContext) -> None:
        self.base_strategy.validate(context)

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return self.base_strategy.describe_communication(method, usual)
