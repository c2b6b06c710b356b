"""Layers out of a model and into it."""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedssl.layers import Layers
from fedssl.methods.base import SSLMethod

# Layers that came through shared memory are read-only; they are only read here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def travelling_layers(method: SSLMethod, *, copy: bool = True) -> Layers:
    """The layers of all parts that are exchanged, on the CPU.

    ``copy=False`` shares the memory of a model on the CPU, for reading at once.
    """
    names = [name for name in method.state_dict() if not is_kept(method, name)]
    return {name: value.numpy() for name, value in _to_cpu(method, names, copy=copy)}


def kept_state(method: SSLMethod) -> dict[str, Tensor]:
    """Copies of the parts that stay with the client."""
    return dict(_to_cpu(method, [name for name in method.state_dict() if is_kept(method, name)], copy=True))


def is_kept(method: SSLMethod, name: str) -> bool:
    """Whether the named layer belongs to a part that never leaves the client."""
    return name.partition(".")[0] in method.kept


@torch.no_grad()
def load_layers(module: nn.Module, layers: Layers) -> None:
    """Copy layers into a module, in place.

    Raises
    ------
    ValueError
        A layer that the module does not have, or has with another shape.
    """
    state = module.state_dict()
    for name, array in layers.items():
        if name not in state or state[name].shape != array.shape:
            has = tuple(state[name].shape) if name in state else "no such layer"
            raise ValueError(f"layer {name} has shape {array.shape} but the model has {has}")
        state[name].copy_(torch.from_numpy(array))


def _to_cpu(method: SSLMethod, names: Iterable[str], *, copy: bool) -> Iterable[tuple[str, Tensor]]:
    state = method.state_dict()
    for name in names:
        yield name, state[name].detach().to("cpu", copy=copy)
