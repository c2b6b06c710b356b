"""Alignment and uniformity (Wang & Isola, ICML 2020)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.methods.base import SSLMethod
from fedssl.methods.heads import MLP
from fedssl.views import Views


def align_uniform(z1: Tensor, z2: Tensor, *, spread: float) -> Tensor:
    """Return the scalar loss of projections ``(batch, dim)`` of two views; ``spread`` weights uniformity."""
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    alignment = (z1 - z2).square().sum(dim=1).mean()
    uniformity = sum(torch.pdist(z).square().mul(-2).exp().mean().log() for z in (z1, z2)) / 2
    return alignment + spread * uniformity


class AlignUniform(SSLMethod):
    """An encoder and a projector; see `align_uniform`."""

    def __init__(self, encoder: Encoder, *, projector: Callable[[int], MLP], spread: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder.feature_dim)
        self.spread = spread

    def loss(self, views: Views) -> Tensor:
        z1, z2 = (self.projector(self.encoder(view)) for view in views.images)
        return align_uniform(z1, z2, spread=self.spread)
