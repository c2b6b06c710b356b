"""Precision of the losses: at least float32, also inside autocast."""

import torch
from torch import Tensor


def at_least_float32(z: Tensor) -> Tensor:
    """Return ``z`` in float32, or unchanged if its precision is higher."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in the precision of its factors, also inside autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
