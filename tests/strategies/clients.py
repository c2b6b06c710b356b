"""A client with a small method: what it receives, how it trains, and its part in a round."""

from functools import partial
from math import sqrt

import numpy as np
import torch

from client_app.state_store import save_state
from fedssl.encoders import conv_small
from fedssl.methods.byol import BYOL
from fedssl.methods.heads import MLP
from fedssl.methods.simclr import SimCLR
from fedssl.model_arrays import exchanged_layers
from fedssl.wire.messages import TrainPlan
from tests.states import load_tensors

HEAD = partial(MLP, hidden_dim=6, out_dim=4)
# A kernel of n numbers that all move by s moves by s sqrt(n). conv_small of width 2 on 8x8 has kernels of 9 times
# 1 * 2, 2 * 4, 4 * 8 and 8 * 8 numbers, so d = s * 3 (sqrt(2) + sqrt(8) + sqrt(32) + 8) / 4.
UNIT = 3 * (sqrt(2) + sqrt(8) + sqrt(32) + 8) / 4


def make_byol(*, target_init: str = "persist") -> BYOL:
    encoder = conv_small(channels=1, size=8, width=2)
    return BYOL(encoder, projector=HEAD, predictor=HEAD, ema_decay=0.9, target_init=target_init)


def make_simclr() -> SimCLR:
    return SimCLR(conv_small(channels=1, size=8, width=2), projector=HEAD, temperature=0.5)


def make_plan(round, layers):
    """A plan with these layers, which nobody may write to."""
    layers = {name: np.asarray(array) for name, array in layers.items()}
    for array in layers.values():
        array.flags.writeable = False
    return TrainPlan(round=round, layers=layers, settings="", metrics=(), oldest_resumable_round=0, code_fingerprint="")


def own_arrays(prefix, folder, client, *, before):
    """The arrays with this prefix of the state that a client of a run has in round ``before``, by layer."""
    state = load_tensors(folder / "clients" / "0000" / str(client), before=before)
    return {key.removeprefix(prefix): np.asarray(value) for key, value in state.items() if "." in key[len(prefix) :]}


def start_of(plan, name):
    """A layer of a plan in float64 as training starts: SwAV's prototypes have length 1, unlike their mean."""
    layer = plan.layers[name].astype(np.float64)
    return layer / np.linalg.norm(layer, axis=1, keepdims=True) if name == "prototypes.weight" else layer


def some_layers(method, seed):
    """Layers of the shapes of the method's travelling ones, all numbers different from seed to seed."""
    random = np.random.default_rng(seed)
    return {
        name: np.asarray(random.uniform(0.5, 1.5, array.shape).astype(array.dtype) + array.dtype.type(10 * seed))
        for name, array in exchanged_layers(method).items()
    }


def snapshot(method):
    return {name: value.detach().numpy().copy() for name, value in method.named_tensors.items()}


@torch.no_grad()
def train(method, *, step):
    """Move every layer, counters included: kernels by ``step``, all others by 1, targets by 2."""
    for name, value in method.named_tensors.items():
        kernel = name.startswith("encoder.") and value.ndim == 4
        value.add_(step if kernel else 2 if name.startswith("target_") else 1)


def participate(method, strategy, plan, folder, *, step=0.25):
    """One client's part in a round as `ClientWorker` plays it; the layers it began with, ended with and sent."""
    half, state = strategy.client, load_tensors(folder, before=plan.round)
    start = half.load_start(method, plan, state)
    began = snapshot(method)
    assert all(np.array_equal(array, began[name]) for name, array in start.items())
    train(method, step=step)
    ended = snapshot(method)
    kept = half.state_to_save(method, plan, start=start, state=state)
    if kept:
        save_state(folder, kept, round=plan.round, oldest_resumable=0)
    sent = {name: array.copy() for name, array in half.upload(method, plan).items()}
    return began, ended, sent
