"""The device a process computes on."""

import torch

from fedssl.errors import InputError


def pick_device(name: str) -> torch.device:
    """The device for ``auto``, ``cpu`` or ``cuda``; raises `InputError` if there is no such device."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("device=cuda but torch finds no GPU; use device=auto or device=cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")
