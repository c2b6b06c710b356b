"""Copies of many tensors between the CPU and an accelerator: one flat buffer per dtype, as in the wire format.

A separate copy of each tensor would cost a launch, and on the way to the CPU a synchronization.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def copy_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU of tensors on one accelerator: contiguous views of one pinned buffer per dtype.

    There is one copy and one synchronization per dtype. Pinned memory is scarce: clone what is kept.
    """
    copies: dict[int, Tensor] = {}
    for group in _by_dtype(tensors):
        flat = torch.cat([tensors[index].reshape(-1) for index in group])
        buffer = pinned_buffer(len(flat), flat.dtype).copy_(flat)
        for index, part in zip(group, buffer.split([tensors[index].numel() for index in group]), strict=True):
            copies[index] = part.view(tensors[index].shape)
    return [copies[index] for index in range(len(tensors))]


@torch.no_grad()
def copy_from_cpu(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors on the CPU into tensors of the same shapes on one accelerator.

    There is one copy per dtype of the targets, asynchronous and from pinned memory.
    """
    for group in _by_dtype(targets):
        own = [targets[index] for index in group]
        sizes = [target.numel() for target in own]
        buffer = pinned_buffer(sum(sizes), own[0].dtype)
        for part, index in zip(buffer.split(sizes), group, strict=True):
            part.copy_(sources[index].reshape(-1))
        arrived = buffer.to(own[0].device, non_blocking=True).split(sizes)
        torch._foreach_copy_(own, [part.view(target.shape) for part, target in zip(arrived, own, strict=True)])


def pinned_buffer(size: int, dtype: torch.dtype) -> Tensor:
    """Return ``size`` arbitrary numbers in memory from which an accelerator copies asynchronously."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())
