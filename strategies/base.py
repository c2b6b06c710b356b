"""Base classes of aggregation algorithms: a server side and a client side.

A `FedSSLStrategy` has a `ServerStrategy` and a `ClientStrategy`. The server side selects the model from which a client
starts, the models that its update goes into, the layers that are exchanged, and the `Aggregator` that computes new
layers. The client side merges downloaded layers with local state, selects the state to save, and the layers to upload.
The defaults are those of federated averaging. The server runs the rounds.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedssl.arrays import Layers
from fedssl.config.component import Component
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, exchanged_names, load_and_start_round, local_names, move_layers_out
from fedssl.regularizers.base import Regularizer
from fedssl.rules import Problem
from fedssl.training import LocalSteps
from fedssl.wire.messages import TrainPlan
from strategies.run_context import RunContext
from strategies.types import (
    GLOBAL,
    AggregatedModel,
    Aggregator,
    ClientState,
    CommunicationSummary,
    GlobalModel,
    LocalData,
    NoState,
    RoundOutcome,
    ServerState,
    TrainAgain,
)
from strategies.update_store import UpdateStore


class ServerStrategy:
    """Server side of an algorithm. By default there is one model, and clients exchange all of it.

    ``make_aggregator`` returns a new aggregator.
    """

    models_per_client: bool = False  # whether every client has a model, named after its id and stored in a file
    exchanges_parts: bool = False  # whether clients send parts of the model in some rounds
    has_server_step: bool = False  # whether `server_step` changes the aggregated layers
    counts_client_states: bool = False  # whether its state has what clients save, which an update must bring once
    num_comparison_images: int = 0  # number of server images on which `on_round_end` compares models; 0 needs none
    # `typing.TypedDict` of the state of one model, which `after_aggregation` returns, and of the state across models,
    # which `on_round_end` returns. A checkpoint is validated against their annotations: plain types, arrays, and
    # ``dict`` of them. The initial states are empty.
    model_state_type: type = NoState
    strategy_state_type: type = NoState

    def __init__(self, make_aggregator: Callable[[], Aggregator]) -> None:
        self._make_aggregator = make_aggregator
        make_aggregator()  # invalid options raise here, before the run

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        """Return the name of the model that a client starts from. A new name refers to the untrained model."""
        return GLOBAL

    def candidate_models(self, state: ServerState, round: int, client: int) -> tuple[str, ...]:
        """Return the names of the models among which a client selects its start; the first is its default.

        If there are several, the client downloads all of them completely and calls `ClientStrategy.select_model`.
        """
        return (self.starting_model(state, round, client),)

    def destination_models(self, state: ServerState, round: int, client: int, start: str) -> tuple[str, ...]:
        """Return the names of the models that receive the update of a client that started from the model ``start``."""
        return (start,)

    def models_to_cluster(self, state: ServerState, round: int) -> tuple[str, ...]:
        """Return the names of the models among which `assign_clusters` divides the updates of the round.

        If empty, `destination_models` assigns each update. Otherwise all updates of the round are stored first.
        """
        return ()

    def assign_clusters(self, clients: Sequence[int], deltas: UpdateStore) -> Mapping[int, str]:
        """Return the model that each client's update goes into, if `models_to_cluster` is not empty.

        ``deltas`` are the changes of the clients' layers, in the order of ``clients``.
        """
        raise NotImplementedError

    def upload_names(self, model: GlobalModel, round: int, layers: Layers) -> tuple[str, ...] | None:
        """Return the names of the trained ``layers`` that clients of the model upload; None means all."""
        return None

    def download_names(
        self, model: GlobalModel, round: int, layers: Layers, last: int | None
    ) -> tuple[str, ...] | None:
        """Return the names of the ``layers`` that a client downloads; None means all.

        ``last`` is the round of its last used update that started from the same model, or None.
        """
        return None

    def arrays_to_send(self, model: GlobalModel, layers: Layers) -> Layers:
        """Return what clients of the model download besides its trained ``layers``, with names and shapes of these.

        It is not rounded by ``wire_dtype``, and read by `ClientStrategy.start_term`.
        """
        return {}

    def arrays_to_receive(self, model: GlobalModel, layers: Layers) -> Layers:
        """Return arrays with the names, shapes and dtypes of those that clients upload besides the ``layers``.

        They are `ClientUpdate.strategy_arrays`, the second result of `ClientStrategy.finish_training`. Only the
        aggregator sees them, so that it must receive every update.
        """
        return {}

    def keeps_model(self, name: str, clients: Collection[int]) -> bool:
        """Return whether a model stays unchanged although updates of these clients were assigned to it."""
        return False

    def aggregator(self, round: int, name: str = GLOBAL) -> Aggregator:
        """Return a new aggregator for one model in one round."""
        return self._make_aggregator()

    def server_step(self, done: AggregatedModel) -> tuple[Layers, Any]:
        """Return the new trained layers and the model's new strategy state, after the aggregation.

        Layers that are left out keep their aggregated values. Server optimizers are applied later. A strategy with this
        step sets ``has_server_step``.
        """
        return done.layers, done.model.strategy_state

    def after_aggregation(self, done: AggregatedModel) -> tuple[Any, dict[str, Any]]:
        """Return the model's new strategy state, and JSON-serializable metrics of the round.

        The state of ``done.model`` is that of `server_step`.
        """
        return done.model.strategy_state, {}

    def on_round_end(self, state: ServerState, outcome: RoundOutcome) -> tuple[Any, dict[str, Any]]:
        """Return the new strategy state across models, and JSON-serializable metrics of the round.

        ``state`` is the server state after the round, with the strategy state from before it.
        """
        return state.strategy_state, {}

    def problem(self, context: RunContext) -> Problem:
        """Return why the algorithm does not support the run."""
        return None

    def prepare(self, context: RunContext) -> None:
        """Store the facts of the run that the algorithm needs, after `problem`; `InputError` for an invalid option."""

    def plot(self, folder: Path) -> None:
        """Write figures of the algorithm into the folder, before the first round."""

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        """Return the description of the exchange, given the default one."""
        return replace(usual, required_metrics=self.aggregator(1).required_metrics)


class ClientStrategy:
    """Client side of an algorithm. By default it loads the downloaded layers and saves the method's local parts."""

    trainings_per_round: int = 1  # for cost estimates
    # Whether `select_model` compares models with the client's state. An unseen client, which has none, trains first.
    selects_by_state: bool = False
    # Whether a client uses own values of the encoder's exchanged layers together with downloaded ones.
    mixes_own_layers: bool = False
    # Whether it computes with both, element by element, so that factors of LoRA must have one basis.
    averages_own_layers: bool = False
    # Whether it runs the downloaded projector in eval mode, with its running statistics.
    evaluates_projector: bool = False
    term: Regularizer | None = None  # term of the local loss, added to the regularizer of the settings
    keeps: str = ""  # what a client keeps besides the local parts of the method, for logs
    # Returns changed layers to upload from those of `layers_to_upload`.
    change_upload: Callable[[SSLMethod, TrainPlan, Layers], Layers] | None = None

    def select_model(
        self, method: SSLMethod, plans: Sequence[TrainPlan], state: ClientState | None, local_data: LocalData
    ) -> int:
        """Return the index of the plan to train, among plans that differ only in their layers.

        Index 0 is the default. The method may be left in any state.
        """
        return 0

    def load_start(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        """Merge the downloaded layers with the local state, load them, and return the start of training.

        ``state`` is the last result of `state_to_save`, or None at the first participation.
        """
        return load_and_start_round(method, {**plan.layers, **layers_in_state(state or {}, method)})

    def start_term(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> None:
        """Set the values of ``term`` for the training that follows; also before that of a personalized model.

        ``plan.strategy_arrays`` are those of `ServerStrategy.arrays_to_send`, and ``state`` is the argument of
        `load_start`.
        """

    def copied_bytes(self, method: SSLMethod) -> int:
        """Return the memory of copies of models that the client uses during training, by default those of `term`."""
        return 0 if self.term is None else self.term.copied_bytes(method)

    def finish_training(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None, steps: LocalSteps
    ) -> tuple[ClientState, Layers]:
        """Return the state to save in addition to `state_to_save`, and the `ServerStrategy.arrays_to_receive`.

        Called after ``steps`` of training, with the arguments of `state_to_save`.
        """
        return {}, {}

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        """Return the state to save until the client's next participation, after training and before the upload.

        Tensors must be copies, because other clients train the same method next. ``start`` is the result of
        `load_start`, and ``state`` its argument. An empty result keeps ``state``.
        """
        return clone_tensors(method, local_names(method))

    def train_personalized(
        self, method: SSLMethod, plan: TrainPlan, state: ClientState | None, *, train: TrainAgain
    ) -> ClientState:
        """Train the personalized model, and return the state to save in addition to `state_to_save`.

        Called after training and before `state_to_save`. The method must be restored. ``state`` is the argument of
        `load_start`.
        """
        return {}

    def personalized_model(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> None:
        """Load the model that the client would use for inference, from the downloaded layers and the saved state."""
        self.load_start(method, plan, state)

    def layers_to_upload(self, method: SSLMethod, plan: TrainPlan) -> Layers:
        """Return the layers to upload. They may be moved out of the method."""
        return move_layers_out(method, upload_names_of(method, plan))

    def upload(self, method: SSLMethod, plan: TrainPlan) -> Layers:
        """Return the `layers_to_upload`, changed by `change_upload`."""
        layers = self.layers_to_upload(method, plan)
        return layers if self.change_upload is None else self.change_upload(method, plan, layers)

    def problem(self, context: RunContext) -> Problem:
        """Return why the algorithm does not support the run."""
        return None

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        """Return the description of the exchange and the local state, given the default one."""
        return replace(usual, local_state=", ".join([self.keeps, *method.local_parts])) if self.keeps else usual


class FedSSLStrategy:
    """Aggregation algorithm, with the clients of federated averaging by default."""

    def __init__(self, server: ServerStrategy, client: ClientStrategy | None = None) -> None:
        self.server, self.client = server, client or ClientStrategy()

    def problem(self, context: RunContext) -> Problem:
        """Return why a side of the algorithm does not support the run."""
        return self.server.problem(context) or self.client.problem(context)

    def describe_communication(self, method: SSLMethod) -> CommunicationSummary:
        """Describe the exchanged layers, the metrics and the local state."""
        parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in exchanged_names(method)))
        usual = CommunicationSummary(
            download=parts, upload=parts, required_metrics=(), local_state=", ".join(method.local_parts) or "nothing"
        )
        given = {False: "made by the server side", True: "of the server side, once"}
        summary = self.client.describe_communication(method, self.server.describe_communication(usual))
        return replace(
            summary,
            download=", ".join(
                [
                    summary.download,
                    *(f"{name} ({given[name in method.static_parts]})" for name in method.broadcast_parts),
                ]
            ),
            upload=", ".join([summary.upload, *(f"{name} (for the server side)" for name in method.uploaded_parts)]),
        )


def make_strategy(component: Component) -> FedSSLStrategy:
    """Instantiate a strategy; `InputError` for another object, and for constructors that do not call super()."""
    strategy = component.make(FedSSLStrategy)
    for side, kind in (("server", ServerStrategy), ("client", ClientStrategy)):
        if not isinstance(getattr(strategy, side, None), kind):
            raise InputError(
                f"{component.target} has no {side} of class {kind.__name__}; call super().__init__(server, client) in "
                "its constructor"
            )
    server = type(strategy.server)
    if server.aggregator is ServerStrategy.aggregator and not hasattr(strategy.server, "_make_aggregator"):
        raise InputError(
            f"{server.__name__} has no aggregator; call super().__init__(make_aggregator) in its constructor"
        )
    return strategy


def upload_names_of(method: SSLMethod, plan: TrainPlan) -> tuple[str, ...]:
    """Return the names of the layers that a client uploads."""
    return tuple(exchanged_names(method)) if plan.upload_names is None else plan.upload_names


def check_state(state: ClientState, strategy: ClientStrategy) -> ClientState:
    """Return what a client saves; `InputError` unless it consists of tensors."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            found = type(value).__name__
            raise InputError(f"the client state {name} of {type(strategy).__name__} is a {found}; return tensors")
    return state


def layers_in_state(state: ClientState, method: SSLMethod) -> Layers:
    """Return the layers of the method in a client's state."""
    return {name: value.numpy() for name, value in state.items() if name in method.named_tensors}
