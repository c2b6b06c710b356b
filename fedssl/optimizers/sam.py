"""Sharpness-aware minimization of local training (FedSAM).

SAM (Foret et al., ICLR 2021, arXiv 2010.01412); on clients: Qu et al., ICML 2022, arXiv 2206.02618, and Caldarola et
al., ECCV 2022, arXiv 2203.11834, who add stochastic weight averaging on the server (``model_average=last``).
Transcribed from the papers, unverified against their code.

A step takes two forward and backward passes on the same views. Running statistics, queues and other buffers of the
method change as in a step with one pass: by the first, at the weights themselves.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import SGD

from fedssl.config.constraints import check_arguments
from fedssl.optimizers.base import SeveralPasses


class SAM(SeveralPasses, SGD):
    r"""SGD whose gradient is that at the worst weights near the current ones.

    $$
    g = \nabla \mathcal{L} \left( w + \rho \frac{\nabla \mathcal{L}(w)}{\lVert \nabla \mathcal{L}(w) \rVert} \right)
    $$

    with $\mathcal{L}$ the loss with its regularizer, w all trained weights, and $\rho$ the radius ``rho``; 0 is SGD.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        rho: float = 0.05,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_arguments("optimizer", rho=rho)
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=fused)
        for group in self.param_groups:  # copies of an optimizer have its groups alone
            group["rho"] = rho

    @torch.no_grad()
    def compute_gradient(
        self, backward: Callable[[], Tensor], buffers: Sequence[Tensor], generators: Sequence[torch.Generator] = ()
    ) -> Tensor:
        rho = self.param_groups[0]["rho"]
        buffers_before = [buffer.clone() for buffer in buffers] if rho else []
        states = [generator.get_state() for generator in generators] if rho else []
        with torch.enable_grad():
            loss = backward()
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        if not rho or not weights:
            return loss
        loss = loss.clone()  # CUDA graphs return static memory
        gradients = [weight.grad for weight in weights]
        kept, kept_buffers = [weight.clone() for weight in weights], [buffer.clone() for buffer in buffers]
        scale = rho / (torch.stack(torch._foreach_norm(gradients)).norm() + 1e-12)
        torch._foreach_add_(weights, torch._foreach_mul(gradients, scale))
        _restore(buffers, buffers_before)  # a queue has not received these images yet
        for generator, state in zip(generators, states, strict=True):  # the loss of the same random numbers
            generator.set_state(state)
        with torch.enable_grad():
            backward()
        _restore(weights, kept)
        _restore(buffers, kept_buffers)
        return loss


def _restore(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
