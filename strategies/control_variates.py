"""Corrections of local gradients, for SCAFFOLD and FedDyn: arrays with the shapes of the trained weights.

They are constant in a round and enter the loss as a linear term (`fedssl.regularizers.linear`), so that they are
clipped with the gradient, and momentum applies to them as to the gradient.
"""

from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch.optim import SGD

from fedssl.arrays import Layers
from fedssl.errors import RequestRefused
from fedssl.methods.base import SSLMethod
from fedssl.rules import Problem
from fedssl.wire.messages import TrainPlan
from strategies.base import upload_names_of
from strategies.run_context import RunContext
from strategies.types import ClientState

ROUND = "round"  # name, in a client's state, of the round after which it was saved


def corrected_names(method: SSLMethod, plan: TrainPlan) -> list[str]:
    """Return the names of the weights that a client trains and uploads."""
    trainable = set(method.trainable)
    return [name for name in upload_names_of(method, plan) if name in trainable]


def arrays_of(state: ClientState | None, names: Iterable[str], *, prefix: str) -> Layers:
    """Return arrays of a client's state by the name of the layer; those that it does not have are missing."""
    return {name: state[prefix + name].numpy() for name in names if prefix + name in state} if state else {}


def as_state(arrays: Layers, *, prefix: str, round: int) -> ClientState:
    """Return arrays as part of the state that a client saves after a round, see `arrays_of`."""
    return {prefix + ROUND: torch.tensor(round)} | {
        prefix + name: torch.from_numpy(array) for name, array in arrays.items()
    }


def check_own(plan: TrainPlan, state: ClientState | None, *, prefix: str) -> None:
    """Refuse a plan on a device without the state of its last used update, whose change the server has counted."""
    saved = int(state[prefix + ROUND]) if state and prefix + ROUND in state else 0
    if plan.last_used_round is not None and saved != plan.last_used_round:
        raise RequestRefused(
            f"it has lost the correction of gradients that it saved in round {plan.last_used_round}, which the server "
            "has counted; register the device under another name"
        )


def zeros_like(layers: Layers, names: Collection[str]) -> Layers:
    """Return zeros for those of the layers that are among the names."""
    return {name: np.zeros_like(array) for name, array in layers.items() if name in names}


def for_clients(arrays: Layers, *, before: int, now: int) -> Layers:
    """Return means over the clients ``before`` as means over the clients ``now``, of which new ones have zeros."""
    if before == now:
        return arrays
    return {name: np.asarray(array * array.dtype.type(before / now)) for name, array in arrays.items()}


def needs_fresh_clients(context: RunContext, *, strategy: str) -> Problem:
    """Refuse late, dropped or repeated updates, and removed states: server and clients would count them differently."""
    settings, accepted = context.settings, context.settings.aggregation
    reordering = context.method.reordering
    extra, deadline, retries = accepted.over_selection, accepted.round_deadline, accepted.max_retries
    for given, setting, remedy in (
        (reordering, f"{reordering}=true", f"{reordering}=false"),
        (accepted.buffered, "aggregation.buffered=true", "aggregation.buffered=false"),
        (extra, f"aggregation.over_selection={extra}", "aggregation.over_selection=0"),
        (deadline is not None, f"aggregation.round_deadline={deadline}", "aggregation.round_deadline=null"),
        # Clients of an attempt that is repeated have saved their corrections.
        (retries and accepted.min_updates > 1, f"aggregation.max_retries={retries}", "aggregation.max_retries=0"),
        (accepted.max_norm_ratio is not None, "aggregation.max_norm_ratio", "aggregation.max_norm_ratio=null"),
        (settings.recording.max_state_bytes is not None, "client_state.max_bytes", "client_state.max_bytes=null"),
    ):
        if given:
            return (
                f"strategy={strategy} needs clients and server to agree on the corrections of gradients, which "
                f"{setting} prevents; set {remedy}"
            )
    return None


def needs_sgd(context: RunContext, *, strategy: str) -> Problem:
    """Refuse optimizers whose steps are not sums of gradients."""
    if isinstance(local_optimizer(context), SGD):
        return None
    return (
        f"strategy={strategy} computes gradients from the change of the weights, which "
        f"{context.settings.training.optimizer.name} rescales; set optimizer=sgd"
    )


def local_optimizer(context: RunContext) -> torch.optim.Optimizer:
    """Return an optimizer with the settings of the clients'."""
    optimizer: torch.optim.Optimizer = context.settings.training.optimizer.instantiate(
        [torch.zeros(1, requires_grad=True)]
    )
    return optimizer
