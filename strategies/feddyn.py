"""FedDyn (Acar et al., ICLR 2021, arXiv 2111.04263, Algorithm 1): local objectives with one common stationary point.

Transcribed from the paper's equations, unverified against its code. A client adds a linear term, the gradient g_k of
its own objective at its last model, and a proximal term. The server adds H = -h / alpha, the sum of all mean changes so
far, each times the share of clients that took part. H is a step of the server that does not vanish for a small
``alpha``: with full participation the first round moves twice as far as federated averaging.

g_k and H have arrays for trained weights; statistics are averaged. The server sends and receives models only. The
proximal term covers weights that stay on the client, too. If an update in a simulation is dropped
after its client has saved g_k, H lacks that change; a device takes it back.
"""

from typing import Any, TypedDict

import numpy as np

from fedssl.arrays import Layers
from fedssl.config.constraints import check_arguments
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import read_layers
from fedssl.regularizers.base import CombinedRegularizer
from fedssl.regularizers.linear import Linear
from fedssl.regularizers.prox import Proximal
from fedssl.rules import Problem
from fedssl.training import LocalSteps
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.control_variates import (
    arrays_of,
    as_state,
    check_own,
    corrected_names,
    for_clients,
    needs_fresh_clients,
)
from strategies.run_context import RunContext
from strategies.types import AggregatedModel, ClientState
from strategies.weighted_sum import WeightedSum

OWN = "feddyn."  # prefix of g_k's arrays in a client's state


class FedDynState(TypedDict, total=False):
    """H and the number N of clients, from the first round on."""

    step: dict[str, np.ndarray]
    clients: int


class FedDynServer(ServerStrategy):
    """Server side of FedDyn."""

    model_state_type = FedDynState
    has_server_step = counts_client_states = True

    def __init__(self) -> None:
        super().__init__(WeightedSum)
        self._trainable: frozenset[str] = frozenset()

    def problem(self, context: RunContext) -> Problem:
        return needs_fresh_clients(context, strategy="feddyn")

    def prepare(self, context: RunContext) -> None:
        self._trainable = frozenset(context.method.trainable)

    def server_step(self, done: AggregatedModel) -> tuple[Layers, FedDynState]:
        state: FedDynState = done.model.strategy_state
        number, layers = done.num_clients, {}
        steps = dict(for_clients(state.get("step", {}), before=state.get("clients", number), now=number))
        share = len(done.received) / number
        for name, mean in done.layers.items():
            if name in self._trainable:
                change = mean.dtype.type(share) * (mean - done.model.layers[name])
                steps[name] = np.asarray(steps[name] + change if name in steps else change)
                layers[name] = np.asarray(mean + steps[name])
        return layers, {"step": steps, "clients": number}

    def after_aggregation(self, done: AggregatedModel) -> tuple[FedDynState, dict[str, Any]]:
        state: FedDynState = done.model.strategy_state
        squares = (float(np.square(step, dtype=np.float64).sum()) for step in state["step"].values())
        return state, {"step_norm": sum(squares) ** 0.5}


class FedDynClient(ClientStrategy):
    """Client side of FedDyn. ``alpha`` as in `FedDyn`."""

    keeps = "a gradient"

    def __init__(self, *, alpha: float) -> None:
        check_arguments("strategy", owner="FedDyn", alpha=alpha)
        self.alpha, self._linear = alpha, Linear()
        self.term = CombinedRegularizer(self._linear, Proximal(weight=alpha))

    def start_term(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> None:
        check_own(plan, state, prefix=OWN)
        own = arrays_of(state, corrected_names(method, plan), prefix=OWN)
        self._linear.load(method, {name: -array for name, array in own.items()})

    def finish_training(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None, steps: LocalSteps
    ) -> tuple[ClientState, Layers]:
        names = corrected_names(method, plan)
        new, own = {}, arrays_of(state, names, prefix=OWN)
        for name, array in read_layers(method, names).items():
            change = array.dtype.type(self.alpha) * (start[name] - array)
            new[name] = np.asarray(own[name] + change if name in own else change)
        return as_state(new, prefix=OWN, round=plan.round), {}


class FedDyn(FedSSLStrategy):
    r"""Dynamic regularization of the clients' objectives.

    $$
    w_k = \underset{w}{\operatorname{argmin}} \; \mathcal{L}_k(w) - \langle g_k, w \rangle
    + \frac{\alpha}{2} \lVert w - w_g \rVert^2 \qquad g_k \leftarrow g_k - \alpha (w_k - w_g)
    $$

    $$
    H \leftarrow H + \frac{1}{N} \sum_{k \in P} (w_k - w_g) \qquad w_g \leftarrow \frac{1}{|P|} \sum_{k \in P} w_k + H
    $$

    with $w_g$ the global weights, $g_k$ and H initially zero, P the clients of the round, N all clients that
    have enough images, and $\alpha$ the ``alpha``.
    """

    def __init__(self, *, alpha: float = 0.01) -> None:
        super().__init__(FedDynServer(), FedDynClient(alpha=alpha))
