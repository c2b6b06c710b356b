"""The device a process computes on."""

import torch
from torch import Tensor

from fedssl.errors import InputError

GPU = "cuda"  # kind of device that computes on its own while the process goes on


def is_gpu(device: torch.device) -> bool:
    """Whether work is best given to it in few large pieces, and never waited for."""
    return device.type == GPU


def pick_device(name: str) -> torch.device:
    """Choose the device.

    Parameters
    ----------
    name : {"auto", "cpu", "cuda"}
        "auto" takes the GPU if there is one.

    Raises
    ------
    InputError
        If there is no such device.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("device=cuda but torch finds no GPU; use device=auto or device=cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device; a GPU takes it from pinned memory, so that nothing waits for the copy."""
    if is_gpu(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
