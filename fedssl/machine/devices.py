"""The device a process computes on, which may be any accelerator that torch supports, and transfers to it."""

import warnings

import torch
from torch import Tensor

from fedssl.config.settings import TrainingSettings
from fedssl.errors import InputError

CPU = "cpu"  # type of the device that computes synchronously
CUDA = "cuda"  # type of devices with CUDA graphs and Triton; AMD's GPUs have it, too
MPS = "mps"  # type of Apple's GPU, which shares the memory of the host


def is_gpu(device: torch.device) -> bool:
    """Return whether the device computes asynchronously, and so needs few large operations without synchronization."""
    return device.type not in (CPU, "meta")


def visible_devices() -> list[str]:
    """Return the names of all devices that torch can use, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    return ["cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count()))]


def select_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is the current accelerator if there is one.

    Raise an `InputError` if torch has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu" if accelerator is None else accelerator.type)
    visible = visible_devices()
    if name in visible or (accelerator is not None and name == accelerator.type):
        return torch.device(name)
    raise InputError(f"device={name} but torch has {', '.join(visible)} only; set one of these, or device=auto")


def count_accelerators(name: str) -> int:
    """Return the number of accelerators that processes with this device can use; 0 without one."""
    device = select_device(name)
    if not is_gpu(device):
        return 0
    return torch.accelerator.device_count() if device.index is None else 1


def device_with_most_memory(name: str) -> str:
    """Return the name of the accelerator with most free memory, of equal ones the last.

    A name that selects one device only, such as "cpu" or "cuda:1", is returned unchanged.
    """
    if count_accelerators(name) < 2:
        return name
    return max(reversed(visible_devices()[1:]), key=lambda device: free_memory(torch.device(device)))


def check_precision(precision: str, device: torch.device) -> None:
    """Raise an `InputError` if the device does not support the precision."""
    if precision == "fp32":
        return
    try:
        with warnings.catch_warnings(action="ignore"), torch.autocast(device.type, dtype=torch.bfloat16):
            supported = torch.is_autocast_enabled(device.type)  # torch disables it, with a warning, or raises
    except RuntimeError:
        supported = False
    if not supported:
        raise InputError(
            f"precision={precision} is not supported by the device {device} (torch has {', '.join(visible_devices())})"
            "; set precision=fp32 or another device"
        )


def check_cuda_features(settings: TrainingSettings, device: torch.device) -> None:
    """Raise an `InputError` if a setting needs CUDA (or ROCm) and the device is another one."""
    if device.type == CUDA:
        return
    augmentation = settings.augmentation.values.get("gpu_augmentation")
    for needs_cuda, setting, remedy in (
        (settings.cuda_graphs, "cuda_graphs=true", "cuda_graphs=false"),
        (augmentation == "triton", "gpu_augmentation=triton", "gpu_augmentation=torch"),
    ):
        if needs_cuda:
            visible = ", ".join(visible_devices())
            raise InputError(
                f"{setting} needs device=cuda but the device is {device} (torch has {visible}); set {remedy}"
            )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device; to a GPU asynchronously, from pinned memory."""
    if is_gpu(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def free_memory(device: torch.device) -> int:
    """Return the free memory of an accelerator in bytes."""
    if device.type == MPS:
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return torch.accelerator.get_memory_info(device)[0]
