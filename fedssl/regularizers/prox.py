"""FedProx's proximal term (Li et al., MLSys 2020): mu / 2 ||w - w_0||^2 keeps local training close to its start.

w_0 is a detached copy of the initial weights. In the FedProx of two public implementations it is a view of the trained
weights, so that the term is always 0.
"""

from typing import Any

import torch
from torch import Tensor

from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer, RegularizerInput


class _HalfSquaredDistance(torch.autograd.Function):
    """``weight / 2 ||weights - start||^2`` over lists of tensors, with few operations (autograd needs 7 per tensor)."""

    @staticmethod
    def forward(ctx: Any, weight: float, start: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.weight, ctx.delta = weight, torch._foreach_sub(list(weights), start)
        return weight / 2 * torch.stack(torch._foreach_norm(ctx.delta)).square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *torch._foreach_mul(ctx.delta, grads[0] * ctx.weight)


def proximal(weights: list[Tensor], start: list[Tensor], *, weight: float) -> Tensor:
    """Return ``weight / 2`` times the squared distance of ``weights`` from ``start``, tensors of equal shapes."""
    distance: Tensor = _HalfSquaredDistance.apply(weight, start, *weights)
    return distance


class Proximal(Regularizer):
    r"""Proximal term over all trained parameters.

    $$
    \mathcal{L}(w) = \ell(w) + \frac{\mu}{2} \lVert w - w_g \rVert^2
    $$

    with $\ell$ the loss of the method, w the trained weights, $w_g$ the same at the start of training, and $\mu$ the
    weight.
    """

    def __init__(self, *, weight: float) -> None:
        self.weight = weight
        self._trained: list[Tensor] = []
        self._start: list[Tensor] = []

    def on_train_start(self, method: SSLMethod) -> None:
        trained: list[Tensor] = [parameter for parameter in method.parameters() if parameter.requires_grad]
        if list(map(id, trained)) != list(map(id, self._trained)):
            self._trained, self._start = trained, [torch.empty_like(weights) for weights in trained]
        with torch.no_grad():
            torch._foreach_copy_(self._start, trained)

    def copied_bytes(self, method: SSLMethod) -> int:
        return method.bytes_of(method.trainable)

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        return loss + proximal(self._trained, self._start, weight=self.weight)
