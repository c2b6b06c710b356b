"""The device a process computes on, and the transfer of images to it."""

import logging

import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes

log = logging.getLogger("fedssl")

GPU = "cuda"  # type of devices that compute asynchronously


def is_gpu(device: torch.device) -> bool:
    """Return whether the device computes asynchronously, and so needs few large operations without synchronization."""
    return device.type == GPU


def select_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is the GPU if there is one. `InputError` if the device does not exist."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("device=cuda but torch finds no GPU; use device=auto or device=cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device; to a GPU asynchronously, from pinned memory."""
    if is_gpu(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def place_images(images: Tensor, device: torch.device) -> Tensor:
    """Copy images to the device, or return them unchanged if they would fill more than half of its free memory.

    The other half remains for the model, its activations and other processes. On a CPU nothing is copied.
    """
    if is_gpu(device):
        free = torch.cuda.mem_get_info(device)[0]
        if 2 * images.nbytes > free:
            log.info(
                "the images (%s) stay in host memory, because the GPU has %s free; batches are copied to the GPU",
                *(gigabytes(images.nbytes), gigabytes(free)),
            )
            return images
    return images.to(device)
