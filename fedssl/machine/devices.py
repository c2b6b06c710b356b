"""The device a process computes on, and the way of images to it."""

import logging

import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes

log = logging.getLogger("fedssl")

GPU = "cuda"  # kind of device that computes on its own while the process goes on


def is_gpu(device: torch.device) -> bool:
    """Whether work is best given to it in few large pieces, and never waited for."""
    return device.type == GPU


def select_device(name: str) -> torch.device:
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


def place_images(images: Tensor, device: torch.device) -> Tensor:
    """Images on the device, or where they are if they would take more than half of its free memory.

    A GPU has room for the model, its activations and other processes then. On a CPU nothing is copied.
    """
    if is_gpu(device):
        free = torch.cuda.mem_get_info(device)[0]
        if 2 * images.nbytes > free:
            log.info(
                "the images (%s) stay in the memory of the host, since the GPU has %s free: batches are fetched",
                *(gigabytes(images.nbytes), gigabytes(free)),
            )
            return images
    return images.to(device)
