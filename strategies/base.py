"""What an aggregation algorithm is: a part that runs on the server and a part that runs on the clients.

An algorithm is a `FedSSLStrategy` with a `ServerStrategy` and a `ClientStrategy`. The server side says which model a
client
starts from and which models its update goes into, which layers travel, and by which `Aggregator` updates become new
layers.
The client side says how a client merges what it receives with what it kept, what it keeps, and what it sends. What is
not said is as in federated averaging. `server_app.round.Round` makes rounds of it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl.arrays import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, exchanged_names, load_and_start_round, local_names, move_layers_out
from fedssl.wire.messages import TrainPlan
from strategies.interfaces import (
    GLOBAL,
    Aggregator,
    ClientState,
    CommunicationSummary,
    GlobalModel,
    LocalData,
    RoundOutcome,
    ServerState,
    StrategyContext,
    TrainAgain,
)


class ServerStrategy:
    """The server side of an algorithm; this one has one model, which all clients exchange as a whole.

    Parameters
    ----------
    make_aggregator : callable
        Makes a fresh rule.

    Attributes
    ----------
    num_comparison_images : int
        How many images of the server's own `on_round_end` compares models with; 0: it needs none.

    Raises
    ------
    InputError
        The rule refuses its options.
    """

    num_comparison_images: int = 0

    def __init__(self, make_aggregator: Callable[[], Aggregator]) -> None:
        self._make_aggregator = make_aggregator
        make_aggregator()  # an option that it refuses is refused here

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        """Name of the model that a client starts from. One that does not exist yet is the untrained model."""
        return GLOBAL

    def candidate_models(self, state: ServerState, round: int, client: int) -> tuple[str, ...]:
        """Names of the models of which a client chooses its start; it takes the first if it cannot tell.

        Of several it receives all, as wholes, and `ClientStrategy.select_model` chooses.
        """
        return (self.starting_model(state, round, client),)

    def destination_models(self, state: ServerState, round: int, client: int, start: str) -> tuple[str, ...]:
        """Names of the models that the update of a client goes into, which started from the model ``start``."""
        return (start,)

    def models_to_cluster(self, state: ServerState, round: int) -> tuple[str, ...]:
        """Return the names of the models among which `assign_clusters` divides the updates of the round.

        If empty, `destination_models` assigns each update. Otherwise all updates of the round are in memory at once.
        """
        return ()

    def assign_clusters(self, ways: Mapping[int, Layers]) -> Mapping[int, str]:
        """Name of the model that each client's update goes into, by what its training changed of the layers.

        Only server strategies whose `models_to_cluster` names models are asked, and these define it.
        """
        raise NotImplementedError

    def upload_names(self, model: GlobalModel, round: int, layers: Layers) -> tuple[str, ...] | None:
        """Names of those ``layers``, the ones trained in this round, that clients of the model send; None: all."""
        return None

    def download_names(
        self, model: GlobalModel, round: int, layers: Layers, last: int | None
    ) -> tuple[str, ...] | None:
        """Names of those ``layers`` that a client receives; None: all.

        ``last`` is the round of its last update, if that was used and had started from the same model.
        """
        return None

    def keeps_model(self, name: str, clients: Collection[int]) -> bool:
        """Whether a model stays as it is although updates of these clients went into it."""
        return False

    def aggregator(self, round: int, name: str = GLOBAL) -> Aggregator:
        """A fresh rule for one model in one round."""
        return self._make_aggregator()

    def after_aggregation(
        self,
        model: GlobalModel,
        round: int,
        layers: Layers,
        *,
        aggregator: Aggregator,
        received: Mapping[int, tuple[str, ...]],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's new memory, and findings of the round for the log, ready for JSON.

        Parameters
        ----------
        model : GlobalModel
            As it was before the round.
        round : int
        layers : Layers
            The trained layers after the round.
        aggregator : Aggregator
            The one that made them.
        received : mapping of int to tuple of str
            For each client whose update went into the model, the names of the trained layers that it had received.
        """
        return model.strategy_state, {}

    def on_round_end(self, state: ServerState, outcome: RoundOutcome) -> tuple[dict[str, Any], dict[str, Any]]:
        """The new memory of the whole, and findings of the round for the log, ready for JSON.

        ``state`` is the one after the round, in its phase, with the memory from before it.
        """
        return state.strategy_state, {}

    def is_valid_model_state(self, strategy_state: Mapping[str, Any]) -> bool:
        """Whether a memory that a checkpoint holds is one that `after_aggregation` makes; the file may be another's."""
        return True

    def is_valid_strategy_state(self, strategy_state: Mapping[str, Any]) -> bool:
        """Whether a memory that a checkpoint holds is one that `on_round_end` makes; the file may be another's."""
        return not strategy_state

    def validate(self, context: StrategyContext) -> None:
        """Refuse a context by an `InputError`, and take from them what the algorithm must know; comes first."""

    def plot(self, folder: Path) -> None:
        """Draw figures of the algorithm's own into the folder, before the first round."""

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        """What is exchanged, given what is usual."""
        return replace(usual, required_metrics=self.aggregator(1).required_metrics)


class ClientStrategy:
    """The client side of an algorithm; this one takes what it receives, and keeps what the method keeps.

    Attributes
    ----------
    trainings_per_round : int
        How often it trains in a round, for what that costs.
    selects_by_state : bool
        Whether `select_model` compares models with the client's state. An unseen client, which has none, trains before
        it selects.
    """

    trainings_per_round: int = 1
    selects_by_state: bool = False

    def select_model(
        self, method: SSLMethod, plans: Sequence[TrainPlan], state: ClientState | None, local_data: LocalData
    ) -> int:
        """The place of the plan that the client follows, among several that differ in their layers only.

        The first is the one to take if the client cannot tell. The method is left as it happens to be.
        """
        return 0

    def load_start(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        """Merge the received layers with what this client kept, load them, and return what it so starts from.

        ``state`` is what `state_to_save` returned last; None: the client kept nothing yet.
        """
        return load_and_start_round(method, {**plan.layers, **layers_in_state(state or {}, method)})

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        """What the client keeps until its next participation; called after training, before `layers_to_upload`.

        Its memory is not the method's, which other clients train next.
        ``start`` is what `load_start` returned, and ``state`` what it was given. What is empty changes nothing: the
        client goes on with ``state``.
        """
        return clone_tensors(method, local_names(method))

    def train_personalized(
        self, method: SSLMethod, plan: TrainPlan, state: ClientState | None, *, train: TrainAgain
    ) -> ClientState:
        """Train what the client has beside the model that it sends; what is returned is kept beside `state_to_save`'s.

        Called after training, before `state_to_save`; the method is left as it was found. ``state`` is what
        `load_start` was given.
        """
        return {}

    def personalized_model(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        """The model that this client itself would use, of what it receives and what it kept last.

        It is loaded into the method; layers that are not returned are as the method prepares them.
        """
        return self.load_start(method, plan, state)

    def layers_to_upload(self, method: SSLMethod, plan: TrainPlan) -> Layers:
        """The layers that the client sends back; they may be taken out of the model."""
        return move_layers_out(method, upload_names_of(method, plan))

    def validate(self, context: StrategyContext) -> None:
        """Refuse a context by an `InputError`."""

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        """What is exchanged and what stays, given what is usual."""
        return usual


class FedSSLStrategy:
    """An aggregation algorithm.

    Parameters
    ----------
    server : ServerStrategy
    client : ClientStrategy, optional
        None: that of federated averaging.
    """

    def __init__(self, server: ServerStrategy, client: ClientStrategy | None = None) -> None:
        self.server, self.client = server, client or ClientStrategy()

    def validate(self, context: StrategyContext) -> None:
        """Refuse a context that the algorithm cannot work with; raises `InputError`."""
        self.server.validate(context)
        self.client.validate(context)

    def describe_communication(self, method: SSLMethod) -> CommunicationSummary:
        """What is exchanged and what stays, in words."""
        parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in exchanged_names(method)))
        usual = CommunicationSummary(
            download=parts, upload=parts, required_metrics=(), local_state=", ".join(method.local_parts) or "nothing"
        )
        given = {False: "made by the server side", True: "of the server side, once"}
        found = self.client.describe_communication(method, self.server.describe_communication(usual))
        return replace(
            found,
            download=", ".join(
                [found.download, *(f"{name} ({given[name in method.static_parts]})" for name in method.broadcast_parts)]
            ),
            upload=", ".join([found.upload, *(f"{name} (for the server side)" for name in method.uploaded_parts)]),
        )


def upload_names_of(method: SSLMethod, plan: TrainPlan) -> tuple[str, ...]:
    """Names under which a client sends layers."""
    return tuple(exchanged_names(method)) if plan.upload_names is None else plan.upload_names


def layers_in_state(state: ClientState, method: SSLMethod) -> Layers:
    """What of a client's state are layers of the method."""
    return {name: value.numpy() for name, value in state.items() if name in method.named_tensors}
