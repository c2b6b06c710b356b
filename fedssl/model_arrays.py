"""Reading layers from a model and loading them into it."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedssl.arrays import GlobalLayers, Layers
from fedssl.low_rank_products import FactorPairs
from fedssl.machine.device_copies import copy_from_cpu, copy_to_cpu
from fedssl.machine.devices import is_gpu
from fedssl.methods.base import SSLMethod

# Layers from shared memory are read-only; they are never written here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def exchanged_layers(method: SSLMethod) -> Layers:
    """Return copies of all exchanged layers, on the CPU."""
    return copy_layers(method, exchanged_names(method))


def copy_layers(method: SSLMethod, names: Iterable[str]) -> Layers:
    """Return copies of the named layers, on the CPU."""
    return {name: value.numpy() for name, value in clone_tensors(method, names).items()}


def names_in_parts(method: SSLMethod, parts: Iterable[str]) -> list[str]:
    """Return the names of all layers of these parts."""
    wanted = set(parts)
    return [name for name in method.named_tensors if part_name(name) in wanted]


def move_layers_out(method: SSLMethod, names: Iterable[str]) -> Layers:
    """Move the named layers out of the model. `load_layers` must fill them before the model is used again.

    On a CPU nothing is copied: the caller gets the model's memory, and the model gets new memory with arbitrary values.
    Until it is filled, `check_loaded` rejects the model.
    """
    if _is_on_gpu(method):
        layers = copy_layers(method, names)
    else:
        layers = read_layers(method, names)
        for name in layers:
            tensor = method.named_tensors[name]
            tensor.data = torch.empty_like(tensor)
    method.moved_out.update(layers)
    return layers


def read_layers(method: SSLMethod, names: Iterable[str]) -> Layers:
    """Return the named layers for reading at once, on the CPU. On a CPU they are the memory of the model."""
    return {name: value.numpy() for name, value in _tensors_on_cpu(method, names).items()}


@contextmanager
def read_once(method: SSLMethod, names: Iterable[str]) -> Iterator[None]:
    """Copy the named layers from an accelerator together, for all functions that read them inside the block.

    The model must not change inside the block. On a CPU nothing is copied.
    """
    if _is_on_gpu(method):
        method.read_copies.update(_copies(method, names))
    try:
        yield
    finally:
        method.read_copies.clear()


def _tensors_on_cpu(method: SSLMethod, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the named layers on the CPU: memory of the model, or a copy from an accelerator; see `read_once`."""
    if not _is_on_gpu(method):
        return {name: method.named_tensors[name].detach().contiguous() for name in names}
    names = list(names)
    copies = method.read_copies | _copies(method, [name for name in names if name not in method.read_copies])
    return {name: copies[name] for name in names}


def _copies(method: SSLMethod, names: Iterable[str]) -> dict[str, Tensor]:
    names = list(names)
    return dict(zip(names, copy_to_cpu([method.named_tensors[name] for name in names]), strict=True))


def _is_on_gpu(method: SSLMethod) -> bool:
    return is_gpu(next(iter(method.named_tensors.values())).device)


def check_loaded(method: SSLMethod, names: Iterable[str] | None = None) -> None:
    """Raise `RuntimeError` if an active layer, or one of ``names``, was moved out of the model and not loaded since."""
    used = method.named_tensors.keys() - method.inactive_names if names is None else set(names)
    missing = method.moved_out & used
    if missing:
        raise RuntimeError(
            f"{len(missing)} layers, such as {min(missing)}, were moved out of the model; load them before it is used"
        )


def clone_tensors(method: SSLMethod, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of the named layers as tensors, on the CPU."""
    usual = torch.contiguous_format
    return {name: value.clone(memory_format=usual) for name, value in _tensors_on_cpu(method, names).items()}


def local_names(method: SSLMethod) -> list[str]:
    """Return the names of the active layers of the parts that never leave the client."""
    return [
        name
        for name in method.named_tensors
        if part_name(name) in method.local_parts and name not in method.inactive_names
    ]


def exchanged_names(method: SSLMethod) -> list[str]:
    """Return the names of the active layers of all exchanged parts, without base layers.

    Parts of the method's server side are not among them.
    """
    others = {*method.local_parts, *method.uploaded_parts, *method.broadcast_parts}
    unused = {*method.inactive_names, *method.base_names}
    return [name for name in method.named_tensors if part_name(name) not in others and name not in unused]


def load_and_start_round(method: SSLMethod, layers: Layers) -> Layers:
    """Load layers, prepare the method for a client's local training, and return the layers with which it starts."""
    load_layers(method, layers)
    local = set(local_names(method))
    first = not layers.keys() >= local
    method.start_round(first=first)
    method.saved_buffers.keep()
    if first:  # the method initializes them
        method.moved_out.difference_update(local)
    changed = method.names_changed_at_start
    return layers | copy_layers(method, changed) if changed else layers


def load_layers(method: SSLMethod, layers: Layers) -> None:
    """Copy layers into a method, in place. Raise a ValueError if it has no such layer, or with another shape."""
    method.saved_buffers.restore()  # a training may have ended before those that were assigned were kept
    tensors = []
    for name, array in layers.items():
        tensor = method.named_tensors.get(name)
        if tensor is None or tensor.shape != array.shape:
            has = "no such layer" if tensor is None else tuple(tensor.shape)
            raise ValueError(f"layer {name} has shape {array.shape} but the model has {has}")
        tensors.append(tensor)
    copy_arrays(tensors, list(layers.values()))
    method.moved_out.difference_update(layers)


@torch.no_grad()
def copy_arrays(tensors: Sequence[Tensor], arrays: Sequence[np.ndarray]) -> None:
    """Copy arrays into tensors of the same shapes, all on one device."""
    sources = [torch.from_numpy(array) for array in arrays]
    if tensors and is_gpu(tensors[0].device):
        copy_from_cpu(tensors, sources)
        return
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source)


def global_layers(method: SSLMethod, layers: Layers) -> GlobalLayers:
    """Return layers of a method as those that others are compared with.

    The products of LoRA are compared as such. They have copies of the factors A that are not exchanged.
    """
    exchanged = set(exchanged_names(method))
    pairs = tuple(pair for pair in method.low_rank_layers if pair.b in exchanged)
    fixed = copy_layers(method, [pair.a for pair in pairs if pair.a not in exchanged])
    return GlobalLayers(layers, FactorPairs(pairs, fixed))


def part_name(name: str) -> str:
    """Return the name of the part that a layer belongs to."""
    return name.partition(".")[0]
