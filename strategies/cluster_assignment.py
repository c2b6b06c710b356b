"""Several global models: the server side clusters clients, and the client side selects a model.

All models start from the same weights. A client without an assignment starts from model k modulo C, where k is its
partition id. A model that receives no update in a round keeps its weights. One model needs no server of this module: it
is the base strategy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import AgglomerativeClustering

from fedssl.arrays import Layers, is_weight
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, load_layers
from fedssl.rules import Problem
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, ServerStrategy
from strategies.gram_matrix import deviation_gram
from strategies.run_context import RunContext
from strategies.types import (
    GLOBAL,
    AggregatedModel,
    Aggregator,
    ClientState,
    CommunicationSummary,
    LocalData,
    RoundOutcome,
    ServerState,
)
from strategies.update_store import UpdateStore

# Prefix in a client's state of its encoder's layers after its last training.
LAST_ENCODER_PREFIX = "own."


def feature_distance(z1: torch.Tensor, z2: torch.Tensor) -> float:
    """Return minus the mean cosine of representations of the same images (Dec-SSL, arXiv 2210.10947, section 5).

    Both are ``(n, dim)``. The result is in [-1, 1]. A representation of length 0 has the cosine 0.
    """
    return -float(F.cosine_similarity(z1.double(), z2.double(), dim=1).mean())


def argmin(distances: Sequence[float]) -> int:
    """Return the index of the smallest distance, the first one of equals. NaN is larger than any number."""
    return min(range(len(distances)), key=lambda index: (math.isnan(distances[index]), distances[index]))


def encoder_names(plan: TrainPlan) -> list[str]:
    """Return the names of the encoder's layers in a plan."""
    return [name for name in plan.layers if name.startswith("encoder.")]


class SelectByFeatures(ClientStrategy):
    """Client that selects the model whose representations of ``num_images`` images are nearest to its own last ones."""

    selects_by_state = True

    def __init__(self, *, num_images: int) -> None:
        self.num_images = num_images

    def select_model(
        self, method: SSLMethod, plans: Sequence[TrainPlan], state: ClientState | None, local_data: LocalData
    ) -> int:
        kept = {name: value for name, value in (state or {}).items() if name.startswith(LAST_ENCODER_PREFIX)}
        own = {name.removeprefix(LAST_ENCODER_PREFIX): value.numpy() for name, value in kept.items()}
        if not own:
            return 0
        encoders = [{name: plan.layers[name] for name in encoder_names(plan)} for plan in plans]
        # Stages that were added since then are those of the first candidate.
        load_layers(method, encoders[0] | {name: array for name, array in own.items() if name in encoders[0]})
        mine = local_data.features(method, self.num_images)
        distances = []
        for encoder in encoders:
            load_layers(method, encoder)
            distances.append(feature_distance(mine, local_data.features(method, self.num_images)))
        return argmin(distances)

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        kept = super().state_to_save(method, plan, start=start, state=state)
        if not plan.candidate_arrays:
            return kept
        encoder = clone_tensors(method, encoder_names(plan))
        return {**kept, **{f"{LAST_ENCODER_PREFIX}{name}": value for name, value in encoder.items()}}

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return replace(usual, local_state=", ".join([*method.local_parts, "own encoder"]))


class SelectByLoss(ClientStrategy):
    """Client that selects the model with the smallest training loss on ``num_images`` images (IFCA)."""

    def __init__(self, *, num_images: int) -> None:
        self.num_images = num_images

    def select_model(
        self, method: SSLMethod, plans: Sequence[TrainPlan], state: ClientState | None, local_data: LocalData
    ) -> int:
        losses = []
        for plan in plans:
            self.load_start(method, plan, state)
            losses.append(local_data.loss(method, self.num_images))
        return argmin(losses)


class ClusterState(TypedDict, total=False):
    """Model that each client was assigned to, by client id."""

    members: dict[int, str]


class ClusteredServer(ServerStrategy):
    """Server with several models. Subclasses define how clients are assigned to them.

    ``base_strategy`` is the server side of the algorithm within each of the C >= 2 ``clusters``, which aggregates them.
    """

    strategy_state_type = ClusterState

    def __init__(self, base_strategy: ServerStrategy, *, clusters: int) -> None:
        super().__init__(partial(base_strategy.aggregator, 1))
        self.base_strategy, self.model_state_type = base_strategy, base_strategy.model_state_type
        self.model_names = tuple(map(str, range(clusters)))

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        return self._members(state).get(client, self.model_names[client % len(self.model_names)])

    def aggregator(self, round: int, name: str = GLOBAL) -> Aggregator:
        return self.base_strategy.aggregator(round, name)

    def after_aggregation(self, done: AggregatedModel) -> tuple[Any, dict[str, Any]]:
        return self.base_strategy.after_aggregation(done)

    def on_round_end(self, state: ServerState, outcome: RoundOutcome) -> tuple[ClusterState, dict[str, Any]]:
        return self._record_assignments({client: names[0] for client, names in outcome.destinations.items()}, state)

    def _record_assignments(
        self, assigned: Mapping[int, str], state: ServerState
    ) -> tuple[ClusterState, dict[str, Any]]:
        """Return the strategy state with these assignments, and the clients of each model for the log."""
        before = self._members(state)
        members = {name: sorted(client for client in assigned if assigned[client] == name) for name in self.model_names}
        moved = sum(self.starting_model(state, state.round, client) != name for client, name in assigned.items())
        return {"members": {**before, **assigned}}, {"clusters": members, "changed_cluster": moved}

    def _members(self, state: ServerState) -> dict[int, str]:
        """Return the model of each assigned client. A checkpoint is untrusted: ignore models that do not exist."""
        strategy_state: ClusterState = state.strategy_state
        return {client: name for client, name in strategy_state.get("members", {}).items() if name in self.model_names}

    def prepare(self, context: RunContext) -> None:
        self.base_strategy.prepare(context)

    def problem(self, context: RunContext) -> Problem:
        if problem := self.base_strategy.problem(context):
            return problem
        clusters, clients = len(self.model_names), context.settings.num_clients
        if clusters > clients:
            return f"strategy.clusters={clusters} but num_clients={clients}; give at most one for each client"
        if context.settings.calibration is not None:
            return (
                "calibration=auxiliary trains the one model that clients share, and "
                f"strategy.clusters={clusters} makes several; set calibration=none"
            )
        if set(context.method.broadcast_parts) - set(context.method.static_parts) or context.method.uploaded_parts:
            return (
                f"{type(context.method).__name__} has a server side of its own for one model, and "
                f"strategy.clusters={clusters} makes several; set another method"
            )
        return None


class ClientAssignedClusters(ClusteredServer):
    """Every client downloads all models and selects one. Its last selection comes first."""

    def candidate_models(self, state: ServerState, round: int, client: int) -> tuple[str, ...]:
        first = self.starting_model(state, round, client)
        return (first, *(name for name in self.model_names if name != first))

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        usual = super().describe_communication(usual)
        download = f"{usual.download} of all {len(self.model_names)} models"
        return replace(usual, download=download, upload=f"{usual.upload}, model chosen")


class ServerAssignedClusters(ClusteredServer):
    """The server compares representations of its own images under the clients' models and under the new models."""

    def __init__(self, base_strategy: ServerStrategy, *, clusters: int, num_images: int) -> None:
        super().__init__(base_strategy, clusters=clusters)
        self.num_comparison_images = num_images

    def on_round_end(self, state: ServerState, outcome: RoundOutcome) -> tuple[ClusterState, dict[str, Any]]:
        models = {name: state.models[name] for name in self.model_names if name in state.models}
        views = {name: outcome.extract_features(model.layers) for name, model in models.items()}
        nearest = {}
        for client, names in outcome.destinations.items():
            # A client keeps its model if another one is equally near.
            order = [names[0], *(name for name in views if name != names[0])]
            features = outcome.client_features[client]
            nearest[client] = order[argmin([feature_distance(features, views[name]) for name in order])]
        return self._record_assignments(nearest, state)

    def problem(self, context: RunContext) -> Problem:
        if problem := super().problem(context):
            return problem
        if not context.server_has_images:
            return (
                "strategy.assign_at=server compares models on images of the server's own, and it has none; name a "
                "data set, or set strategy.assign_at=client"
            )
        return None


class OneShotClusters(ClusteredServer):
    """Divides the updates of ``cluster_round``, from 1, by the angles between them. Assignments do not change later.

    Before that round all clients train the first model. A client that joins later is assigned to the largest cluster.
    """

    def __init__(self, base_strategy: ServerStrategy, *, clusters: int, cluster_round: int) -> None:
        super().__init__(base_strategy, clusters=clusters)
        self.cluster_round = cluster_round

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        members = self._members(state)
        if client in members:
            return members[client]
        return max(self.model_names, key=list(members.values()).count)

    def models_to_cluster(self, state: ServerState, round: int) -> tuple[str, ...]:
        if round < self.cluster_round or self._members(state):
            return ()
        return self.model_names

    def assign_clusters(self, clients: Sequence[int], deltas: UpdateStore) -> Mapping[int, str]:
        labels = cluster_by_cosine(deltas, clusters=len(self.model_names))
        return {client: self.model_names[label] for client, label in zip(clients, labels, strict=True)}

    def on_round_end(self, state: ServerState, outcome: RoundOutcome) -> tuple[ClusterState, dict[str, Any]]:
        if outcome.round < self.cluster_round:
            return {}, {}
        return super().on_round_end(state, outcome)

    def problem(self, context: RunContext) -> Problem:
        if problem := super().problem(context):
            return problem
        settings = context.settings
        per_round, clients = settings.clients_per_round, settings.num_clients - settings.unseen_clients
        if self.cluster_round > settings.rounds:
            return (
                f"strategy.cluster_round={self.cluster_round} is the round in which clients are sorted, and there are "
                f"rounds={settings.rounds}; lower strategy.cluster_round or raise rounds"
            )
        if per_round < clients:
            return (
                f"strategy.assign_by=update_cosine sorts all clients in round {self.cluster_round}, but "
                f"clients_per_round={per_round} of num_clients={clients} take part; set clients_per_round={clients}"
            )
        return None


def cluster_by_cosine(deltas: UpdateStore, *, clusters: int) -> list[int]:
    """Divide updates by average linkage on 1 - cosine (Briggs et al., IJCNN 2020, arXiv 2004.11791).

    Return the cluster of each update, numbered in the order of their first updates. Only weights are compared, and of
    pairs of factors the changes of their products. An update of length 0 is orthogonal to all others.
    """
    if len(deltas) < 2:
        return [0] * len(deltas)
    zero = {name: np.zeros_like(array) for name, array in deltas.reference.layers.items() if is_weight(name, array)}
    gram = deviation_gram(deltas.reference.with_layers(zero), deltas, exact=True)
    lengths = np.sqrt(gram.diagonal())
    lengths[lengths == 0] = 1.0
    distances = np.maximum(1 - gram / np.outer(lengths, lengths), 0)
    np.fill_diagonal(distances, 0)
    tree = AgglomerativeClustering(min(clusters, len(deltas)), metric="precomputed", linkage="average")
    labels = tree.fit(distances).labels_.tolist()
    order = list(dict.fromkeys(labels))
    return [order.index(label) for label in labels]
