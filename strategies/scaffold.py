"""SCAFFOLD (Karimireddy et al., ICML 2020, arXiv 1910.06378, Algorithm 1): gradients corrected for client drift.

A client corrects every gradient by c - c_i, where its control variate c_i estimates its own gradient and c that of all
clients. Transcribed from the paper's equations, unverified against its code. Option II sets c_i to the mean gradient of
the local steps, from the change of the weights (Eq. 4). With momentum, which the paper does not use, the change is
divided by ||a||_1 of FedNova instead of the number K of steps: then it is a weighted mean of the gradients.

A client that does not take part keeps its c_i. All c_i and c are initially zero, so that round 1 is federated
averaging. They travel as float32 with every ``wire_dtype``, and make up half of the exchanged bytes. If an
update in a simulation is dropped after its client has saved c_i, c lacks that change; a device takes it back.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from fedssl.arrays import Cosines, GlobalLayers, Layers, is_weight
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import read_layers
from fedssl.regularizers.linear import Linear
from fedssl.rules import Problem
from fedssl.training import LocalSteps
from fedssl.wire.messages import ClientUpdate, TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.control_variates import (
    arrays_of,
    as_state,
    check_own,
    corrected_names,
    for_clients,
    needs_fresh_clients,
    needs_sgd,
    zeros_like,
)
from strategies.fedavg import make_weighted_mean
from strategies.run_context import RunContext
from strategies.types import AggregatedModel, ClientState, CommunicationSummary, GlobalModel
from strategies.weighted_sum import WeightedSum

OWN = "scaffold."  # prefix of c_i's arrays in a client's state


def control_change(control: Layers, start: Layers, trained: Layers, *, scale: float) -> Layers:
    """Return c_i' - c_i = (x - y_i) / scale - c of every layer of ``trained``.

    ``control`` is c, whose missing layers are zero, ``start`` is x and ``trained`` y_i. ``scale`` is K times the
    learning rate, 0 if the client has not trained; then nothing changes.
    """
    change = {}
    for name, array in trained.items():
        gradient = (start[name] - array) / array.dtype.type(scale) if scale else None  # Eq. 4
        own = control.get(name, np.zeros_like(array))
        change[name] = np.zeros_like(array) if gradient is None else np.asarray(gradient - own)
    return change


class ControlledSum:
    """Weighted mean of the clients' models, and ``total``, the sum of the changes of their control variates."""

    def __init__(self, mean: WeightedSum) -> None:
        self._mean = mean
        self.total: Layers = {}

    @property
    def required_metrics(self) -> tuple[str, ...]:
        return self._mean.required_metrics

    def start(self, global_layers: GlobalLayers) -> None:
        self._mean.start(global_layers)
        self.total = {}

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        self._mean.add(update, cosines)
        for name, array in update.strategy_arrays.items():
            self.total[name] = self.total[name] + array if name in self.total else array

    def finish(self) -> Layers:
        return self._mean.finish()


class ScaffoldState(TypedDict, total=False):
    """The control variate c of the server and the number N of clients, from the first round on."""

    control: dict[str, np.ndarray]
    clients: int


class ScaffoldServer(ServerStrategy):
    """Server side of SCAFFOLD. ``server_lr`` as in `Scaffold`."""

    model_state_type = ScaffoldState
    counts_client_states = True

    def __init__(self, make_mean: Callable[[], WeightedSum], *, server_lr: float) -> None:
        super().__init__(lambda: ControlledSum(make_mean()))
        self.server_lr, self.has_server_step = server_lr, server_lr != 1
        self._trainable: frozenset[str] = frozenset()

    def problem(self, context: RunContext) -> Problem:
        return needs_sgd(context, strategy="scaffold") or needs_fresh_clients(context, strategy="scaffold")

    def prepare(self, context: RunContext) -> None:
        self._trainable = frozenset(context.method.trainable)

    def arrays_to_send(self, model: GlobalModel, layers: Layers) -> Layers:
        """Return c, with zeros for weights that have not been trained, so that all rounds have equal sizes."""
        state: ScaffoldState = model.strategy_state
        known = {name: array for name, array in state.get("control", {}).items() if name in layers}
        return zeros_like(layers, self._trainable) | known

    def arrays_to_receive(self, model: GlobalModel, layers: Layers) -> Layers:
        return zeros_like(layers, self._trainable)

    def server_step(self, done: AggregatedModel) -> tuple[Layers, Any]:
        lr, old = self.server_lr, done.model.layers
        layers = {
            name: np.asarray(old[name] + array.dtype.type(lr) * (array - old[name]))  # Eq. 5
            for name, array in done.layers.items()
            if is_weight(name, array)
        }
        return layers, done.model.strategy_state

    def after_aggregation(self, done: AggregatedModel) -> tuple[ScaffoldState, dict[str, Any]]:
        assert isinstance(done.aggregator, ControlledSum)
        number = done.num_clients
        before = done.model.strategy_state.get("clients", number)
        control = for_clients(self.arrays_to_send(done.model, done.layers), before=before, now=number)
        for name, total in done.aggregator.total.items():
            control[name] = np.asarray(control[name] + total / total.dtype.type(number))  # Eq. 5
        norm = sum(float(np.square(array, dtype=np.float64).sum()) for array in control.values()) ** 0.5
        return {"control": control, "clients": number}, {"control_norm": norm}

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        usual = super().describe_communication(usual)
        return replace(
            usual,
            download=f"{usual.download}, control variates",
            upload=f"{usual.upload}, changes of control variates",
        )


class ScaffoldClient(ClientStrategy):
    """Client side of SCAFFOLD."""

    keeps = "a control variate"

    def __init__(self) -> None:
        self.term = self._term = Linear()

    def start_term(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> None:
        check_own(plan, state, prefix=OWN)
        names, control = corrected_names(method, plan), plan.strategy_arrays
        own = arrays_of(state, names, prefix=OWN)
        slopes = dict(control)
        for name, array in own.items():
            slopes[name] = control[name] - array if name in control else -array  # c - c_i, Eq. 3
        self._term.load(method, slopes)

    def finish_training(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None, steps: LocalSteps
    ) -> tuple[ClientState, Layers]:
        names = corrected_names(method, plan)
        trained = read_layers(method, names)
        change = control_change(plan.strategy_arrays, start, trained, scale=steps.lr * steps.norm)
        own = arrays_of(state, names, prefix=OWN)
        new = {name: own[name] + array if name in own else array for name, array in change.items()}
        return as_state(new, prefix=OWN, round=plan.round), change


class Scaffold(FedSSLStrategy):
    r"""Federated averaging whose clients correct their gradients by control variates.

    $$
    y_i \leftarrow y_i - \eta_l (g_i(y_i) - c_i + c) \qquad
    c_i' = c_i - c + \frac{1}{K \eta_l} (x - y_i) \qquad
    x \leftarrow x + \eta_g \sum_i \beta_i (y_i - x) \qquad
    c \leftarrow c + \frac{1}{N} \sum_i (c_i' - c_i)
    $$

    with x the global weights, $y_i$ those of client i during its K steps with learning rate $\eta_l$, N all clients
    that have enough images, $\beta_i$ as in federated averaging (``weighting``) and $\eta_g$ the ``server_lr``.
    """

    def __init__(self, *, weighting: str = "uniform", server_lr: float = 1.0) -> None:
        super().__init__(ScaffoldServer(make_weighted_mean(weighting), server_lr=server_lr), ScaffoldClient())
