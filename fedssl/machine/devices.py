"""The device a process computes on."""

import torch
from torch import Tensor

from fedssl.errors import InputError


def pick_device(name: str) -> torch.device:
    """The device for ``auto``, ``cpu`` or ``cuda``; raises `InputError` if there is no such device."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("device=cuda but torch finds no GPU; use device=auto or device=cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device; a GPU takes it from pinned memory, so that nothing waits for the copy."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
