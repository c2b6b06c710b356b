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
        own = [tensors[index] for index in group]
        sizes = [tensor.numel() for tensor in own]
        buffer = pinned_buffer(sum(sizes), own[0].dtype)
        parts = [part.view(tensor.shape) for part, tensor in zip(buffer.split(sizes), own, strict=True)]
        try:
            buffer.copy_(torch.cat([tensor.reshape(-1) for tensor in own]))
        except torch.OutOfMemoryError:  # no memory for the flat buffer
            for part, tensor in zip(parts, own, strict=True):
                part.copy_(tensor)
        copies |= dict(zip(group, parts, strict=True))
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
        try:
            arrived = buffer.to(own[0].device, non_blocking=True)
        except torch.OutOfMemoryError:  # no memory for the flat buffer
            arrived = buffer
        parts = [part.view(target.shape) for part, target in zip(arrived.split(sizes), own, strict=True)]
        if arrived is not buffer:
            torch._foreach_copy_(own, parts)
            continue
        for target, part in zip(own, parts, strict=True):
            target.copy_(part)


def pinned_buffer(size: int, dtype: torch.dtype) -> Tensor:
    """Return ``size`` arbitrary numbers in memory from which an accelerator copies asynchronously."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())
