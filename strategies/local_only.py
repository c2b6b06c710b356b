"""Every client alone: nothing is combined, the natural lower bound of a federation.

Clients train as under any other strategy, from the same initial model, as often and as long, but each goes on from its
own model. What they send is for the evaluation only: every client's newest model is evaluated by itself, and results
are means over clients. The global layers stay as they were at first; a client that takes part later begins with them.

The server holds a model for every client that has taken part.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fedssl.layers import Alignment, GlobalLayers, Layers
from fedssl.messages import ClientUpdate, TrainPlan
from fedssl.methods.base import SSLMethod
from fedssl.model_layers import copies, kept_names, travelling_names
from fedssl.schedule.stages import inherited
from strategies.base import FedSSLStrategy, State, Travels


class NewestModels:
    """A rule that combines nothing: the newest model of every client, and the global layers as they are.

    Attributes
    ----------
    models : dict of int to Layers
        By partition id.
    """

    def __init__(self) -> None:
        self.models: dict[int, Layers] = {}

    def start(self, global_layers: GlobalLayers) -> None:
        self._global = global_layers.layers

    def add(self, update: ClientUpdate, alignment: Alignment) -> None:
        self.models[update.partition_id] = {**self.models.get(update.partition_id, {}), **update.layers}

    def finish(self) -> Layers:
        return self._global


class LocalOnly(FedSSLStrategy):
    """Clients that train alone."""

    def __init__(self, *, metrics: Sequence[str] = ()) -> None:
        super().__init__(metrics=metrics)
        self._newest = NewestModels()

    def rule(self, round: int) -> NewestModels:
        return self._newest

    def models(self, layers: Layers) -> dict[str, Layers]:
        return {f"-{client}": {**layers, **model} for client, model in sorted(self._newest.models.items())}

    def own_layers(self, client: int, sent: Layers) -> Layers:
        return self._newest.models[client]

    def travels(self, method: SSLMethod) -> Travels:
        return replace(super().travels(method), stays="its whole model")

    def state(self) -> dict[str, Any]:
        models = {
            client: {name: torch.from_numpy(array) for name, array in model.items()}
            for client, model in self._newest.models.items()
        }
        return {**super().state(), "models": models}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._newest.models = {
            client: {name: tensor.numpy() for name, tensor in model.items()}
            for client, model in state["models"].items()
        }

    def load_global(self, method: SSLMethod, plan: TrainPlan, state: State | None) -> None:
        if state is not None and plan.transfer and plan.depth is not None:
            # What the server hands on to a new stage is of the untrained model.
            before, new = (f"encoder.{name}." for name in method.encoder.stage_names[plan.depth - 2 : plan.depth])
            state = inherited(state, before=before, new=new, like=method.tensors) | state
        super().load_global(method, plan, state)

    def keep(self, method: SSLMethod, plan: TrainPlan) -> State:
        method.end_alone()
        return copies(method, [*travelling_names(method), *kept_names(method)])
