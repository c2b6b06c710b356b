"""Continue after an accelerator ran out of memory: recognize the error, free memory, use smaller chunks or the CPU."""

import copy
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedssl.logs import log
from fedssl.machine.devices import CPU, is_gpu

OUT_OF_MEMORY = torch.OutOfMemoryError.__name__  # begins the reason of a client that its engine runs again
# Errors of other types: of Apple's GPUs and of CUDA's runtime, and of its libraries, which allocate memory themselves.
_MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an accelerator ran out of memory, in this error or in the one that it was raised for."""
    while not isinstance(error, torch.OutOfMemoryError):
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES):
            return True
        if error.__context__ is None:
            return False
        error = error.__context__
    return True


def free_cached_memory() -> None:
    """Return the memory of deleted tensors to the accelerator. Call it outside of ``except``, which keeps tensors."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def retry_in_chunks(compute: Callable[[torch.device, int], T], *, device: torch.device, chunk: int = 1, what: str) -> T:
    """Return ``compute(device, chunk)``; without enough memory with half the chunk until it fits, then on the CPU.

    ``compute`` returns the same for every chunk, apart from rounding, and leaves no tensors behind if it fails. On the
    CPU it gets the full chunk. ``what`` is the subject and verb of the log line, such as "features are computed".
    """
    size = chunk
    while is_gpu(device):
        try:
            result = compute(device, size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            if size < chunk:
                log.warning("%s has too little memory: %s in chunks of %d instead of %d", device, what, size, chunk)
            return result
        free_cached_memory()
        if size == 1:
            log.warning("%s has too little memory: %s on the CPU", device, what)
            break
        size = (size + 1) // 2
    return compute(torch.device(CPU), chunk)


def deepcopy_to_cpu(value: T, tensors: Iterable[Tensor]) -> T:
    """Return a deep copy in which these tensors are on the CPU. It needs no memory of their device."""
    return copy.deepcopy(value, {id(tensor): _on_cpu(tensor) for tensor in tensors})


def module_on_cpu(module: Module) -> Module:
    """Return a copy of a module on the CPU."""
    return deepcopy_to_cpu(module, [*module.parameters(), *module.buffers()])


def _on_cpu(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to(CPU, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied
