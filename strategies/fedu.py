"""FedU (Zhuang et al., ICCV 2021): the client decides for each network whether to use the global one.

The server averages the clients' online encoders, projectors and predictors, weighted by examples. A client uses the
global online encoder and projector, keeps its own target networks, and uses the global predictor only if the divergence
of its encoder in its last training was small: d < mu (DAPU, divergence-aware predictor update, Eq. 3). It measures d at
the end of training, from the encoder that it had downloaded. The decision applies to its next participation. In its
first participation it uses the complete global model.

Three options give the twelve cells of the paper's Table 4: the networks that are averaged (``aggregate``), the networks
that the average overwrites (``update``), and the use of the predictor. "Network" means encoder and projector with all
their layers, including running statistics. Deviations from the paper or the authors' code:

- in Eq. 3, d is the sum of squares over all weights (``squared_l2``). In the authors' code, which produced the paper's
  numbers, it is the mean over the convolution kernels of the root of that sum (``mean_conv_l2``, the default);
- in a client's first round the authors' target *is* the online network. Here it starts as a copy of it;
- the authors' clients also exchange networks that no option requires. Here these stay local.

For methods without a predictor (SimCLR, DINO, supervised, MAE) DAPU decides on the projector, the prototypes, the
classifier or the decoder, the last part of the network, instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedssl.arrays import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, exchanged_names, load_and_start_round, local_names, move_layers_out
from fedssl.rules import Problem
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy, layers_in_state, upload_names_of
from strategies.encoder_divergence import distance_problem, encoder_divergence
from strategies.fedavg import make_weighted_mean
from strategies.run_context import RunContext
from strategies.types import ClientState, CommunicationSummary

USE_GLOBAL_PREDICTOR, DISTANCE = "dapu.global", "dapu.distance"  # keys of a client's state besides layers


@dataclass(kw_only=True, eq=False)
class FedUClient(ClientStrategy):
    """Client side of FedU: the networks that a client uploads and uses."""

    # "online" or "target": encoder and projector that clients upload, under the names of the online ones.
    aggregate: str = "online"
    # "online", "target" or "both": those that the downloaded ones overwrite. The others keep the client's values.
    update: str = "online"
    # "global": the downloaded one. "local": the client's own. "dapu": global if d < ``predictor_threshold``.
    predictor: str = "dapu"
    distance: str = "mean_conv_l2"  # d, see `strategies.encoder_divergence`
    predictor_threshold: float = 0.4  # mu of Eq. 3, in the unit of d; 0 is always local

    def __post_init__(self) -> None:
        self.mixes_own_layers = self.averages_own_layers = self.update == "target"

    def problem(self, context: RunContext) -> Problem:
        method = context.method
        kind = type(method).__name__
        if not _targets(method) and (self.aggregate, self.update) != ("online", "online"):
            return (
                f"strategy.aggregate={self.aggregate} strategy.update={self.update} needs a method with target "
                f"networks and {kind} has none; set both to online, or method=byol"
            )
        if method.target_init == "average":
            return (
                "method.target_init=average exchanges target networks beside the online ones, but strategy.aggregate "
                "and strategy.update select one of the two; set method.target_init=persist, or strategy=fedavg"
            )
        if method.target_init == "reset" and self.update != "both":
            return (
                "method.target_init=reset makes the target anew every round, against "
                f"strategy.update={self.update}; "
                "set method.target_init=persist or strategy.update=both"
            )
        if self.predictor != "global" and _head(method) not in _parts(exchanged_names(method)):
            return (
                f"strategy.predictor={self.predictor} needs a method that exchanges a predictor or projector and "
                f"{kind} exchanges neither; set strategy.predictor=global"
            )
        if self.predictor == "dapu":
            return distance_problem(method, distance=self.distance)
        return None

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        sources = self._sources(method, exchanged_names(method))
        up = {name.partition(".")[0]: source.partition(".")[0] for name, source in sources.items()}
        local_state = _parts(self._own(method, exchanged_names(method), local_head=self.predictor != "global"))
        if self.predictor == "dapu":
            local_state = [f"{part} (if DAPU decides so)" if part == _head(method) else part for part in local_state]
            local_state += ["DAPU's distance and decision"]
        return replace(
            usual,
            upload=", ".join(part if part == source else f"{source} (as {part})" for part, source in up.items()),
            local_state=", ".join(local_state) or "nothing",
        )

    def load_start(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        layers = dict(plan.layers)
        if state is not None:
            if self.update != "online":
                layers |= {target: plan.layers[online] for online, target in _targets(method).items()}
            mine = self._own(method, upload_names_of(method, plan), local_head=True)  # without stages frozen since then
            layers |= {name: array for name, array in layers_in_state(state, method).items() if name in mine}
        return load_and_start_round(method, layers)

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        if self.predictor != "dapu":
            return clone_tensors(
                method, self._own(method, upload_names_of(method, plan), local_head=self.predictor == "local")
            )
        distance = encoder_divergence(method, plan.layers, distance=self.distance)
        if not math.isfinite(distance):
            return {}  # training failed: the client keeps its previous state
        take_global = distance < self.predictor_threshold  # Eq. 3
        decision = {
            USE_GLOBAL_PREDICTOR: torch.tensor(take_global),
            DISTANCE: torch.tensor(distance, dtype=torch.float64),
        }
        return decision | clone_tensors(
            method, self._own(method, upload_names_of(method, plan), local_head=not take_global)
        )

    def layers_to_upload(self, method: SSLMethod, plan: TrainPlan) -> Layers:
        sources = self._sources(method, upload_names_of(method, plan))
        taken = move_layers_out(method, sources.values())
        return {name: taken[source] for name, source in sources.items()}

    def _own(self, method: SSLMethod, trained: Sequence[str], *, local_head: bool) -> list[str]:
        """Return the names of those trained and local layers that the next download does not overwrite."""
        head, targets = _head(method), set(_targets(method).values())
        kept = [name for name in local_names(method) if self.update == "online" or name not in targets]
        online = [name for name in trained if (local_head if name.startswith(f"{head}.") else self.update == "target")]
        return online + kept

    def _sources(self, method: SSLMethod, names: Sequence[str]) -> dict[str, str]:
        """Map the names under which layers are uploaded to their names in the model."""
        targets = _targets(method) if self.aggregate == "target" else {}
        return {name: targets.get(name, name) for name in names}


class FedU(FedSSLStrategy):
    r"""Federated averaging with FedU's client side. ``weighting`` as in `FedAvg`, other options in `FedUClient`.

    $$
    f_\phi = \frac{\sum_k n_k f_{\theta_k}}{\sum_k n_k} \qquad
    p_k \leftarrow \begin{cases} p_\phi & d_k < \mu \\ p_{\theta_k} & \text{else} \end{cases} \qquad
    d_k = \frac{1}{N} \sum_{l=1}^{N} \lVert \theta_k^{(l)} - \phi_k^{(l)} \rVert
    $$

    with f the encoder and projector, p the predictor (the projector if there is none), $\phi_k$ the encoder that client
    k received in its last round, $\theta_k$ the same after its training, and $\mu$ the threshold. ``squared_l2`` is Eq.
    3.
    """

    def __init__(
        self,
        *,
        weighting: str = "examples",
        aggregate: str = "online",
        update: str = "online",
        predictor: str = "dapu",
        distance: str = "mean_conv_l2",
        predictor_threshold: float = 0.4,
    ) -> None:
        client = FedUClient(
            aggregate=aggregate,
            update=update,
            predictor=predictor,
            distance=distance,
            predictor_threshold=predictor_threshold,
        )
        super().__init__(ServerStrategy(make_weighted_mean(weighting)), client)


def _targets(method: SSLMethod) -> dict[str, str]:
    return {name.removeprefix("target_"): name for name in local_names(method) if name.startswith("target_")}


def _head(method: SSLMethod) -> str:
    parts = _parts(exchanged_names(method))
    heads = ("predictor", "prototypes", "projector", "classifier", "decoder")
    return next((part for part in heads if part in parts), "predictor")


def _parts(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in names))
