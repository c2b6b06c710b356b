"""Small methods on random views."""

from functools import partial

import torch
from torch import Tensor

from fedssl.encoders import conv_small
from fedssl.methods.base import SSLMethod
from fedssl.methods.heads import MLP
from fedssl.views import Views

HEAD = partial(MLP, hidden_dim=16, out_dim=8)


def encoder():
    torch.manual_seed(0)
    return conv_small(channels=1, size=8, width=4)


def views(batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, 1, 8, 8, generator=generator), torch.rand(batch, 1, 8, 8, generator=generator)


def step(method: SSLMethod, *, lr: float = 0.5) -> None:
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=lr)
    method.loss(Views.of(*views())).backward()
    optimizer.step()
    method.on_step_end()
