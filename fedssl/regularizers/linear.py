"""A linear term of the loss, which adds a constant to the gradient: control variates and dual variables."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import copy_arrays
from fedssl.regularizers.base import Regularizer, RegularizerInput


class _Slope(torch.autograd.Function):
    """Function of tensors with constant gradients and the value 0."""

    @staticmethod
    def forward(ctx: Any, slopes: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.slopes = slopes
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.slopes, grads[0])


class Linear(Regularizer):
    r"""Linear term of the trained weights, whose gradient is the slope.

    $$
    \mathcal{L}(w) = \ell(w) + \langle a, w \rangle
    $$

    with $\ell$ the loss of the method, w the trained weights, and a the slope of the last `load`. The value of the
    term, whose origin is arbitrary, is left out of the loss, so that losses of clients and rounds can be compared.
    """

    def __init__(self) -> None:
        self._trained: list[Tensor] = []
        self._slopes: list[Tensor] = []

    def load(self, method: SSLMethod, slopes: Mapping[str, np.ndarray]) -> None:
        """Set the slope of every trained weight by its name; that of others is zero."""
        trained = {name: tensor for name, tensor in method.named_tensors.items() if tensor.requires_grad}
        if list(map(id, trained.values())) != list(map(id, self._trained)):
            self._trained = list(trained.values())
            self._slopes = [torch.zeros_like(weights) for weights in self._trained]
        else:  # in place: CUDA graphs use this memory
            torch._foreach_zero_(self._slopes)
        given = [(slope, slopes[name]) for name, slope in zip(trained, self._slopes, strict=True) if name in slopes]
        copy_arrays([slope for slope, _ in given], [array for _, array in given])

    def copied_bytes(self, method: SSLMethod) -> int:
        return method.bytes_of(method.trainable)

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if not self._trained:
            return loss
        term: Tensor = _Slope.apply(self._slopes, *self._trained)
        return loss + term
