"""SSD, Soft Separation and Distillation (Fang et al., ICCV 2025, arXiv 2508.01251): two terms for global uniformity.

Dimension-scaled regularization (DSR) lets the projections of each client extend along dimensions of its own, so that
those of different clients are far apart. Projector distillation (PD) passes this on to the representations, which are
evaluated. Transcribed from a summary of the paper, unverified against it. The authors' code differs from the summary,
and this implementation from both:

- clients have disjoint sets of dimensions by their numbers, each a ``share`` of all: 1 / K for K clients in the paper
  and in the code. With a larger share, and on devices without a partition, some have the same set. The code turns the
  axes;
- the scaled projection is normalized, as in the code, and in the summary it is not. The code divides the norm over the
  batch by its size, which is a smaller term than the mean of squares here and in the summary;
- PD is the summary's, except that the projection, its target, has no gradient. The code has KL(softmax(z / 0.5),
  softmax(h / 0.5)) with a gradient of both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32
from fedssl.methods.align_uniform import AlignUniform, alignment_loss, uniformity_loss
from fedssl.methods.heads import MLP
from fedssl.views import Views


def dimension_scaled(z: Tensor, scales: Tensor) -> Tensor:
    """Return the mean of ``|z - s|^2``, with s the normalized product of z and the scales, without gradient.

    ``z`` is ``(batch, dim)`` and normalized here; ``scales`` are ``(dim,)``. The result is in [0, 4], 0 for equal
    scales.
    """
    z = F.normalize(at_least_float32(z), dim=1)
    return (z - F.normalize(z * scales, dim=1).detach()).square().sum(dim=1).mean()


def projector_distillation(h: Tensor, z: Tensor) -> Tensor:
    """Return the mean of ``KL(softmax(h), softmax(z))`` over rows ``(batch, dim)``, >= 0, without a gradient of z."""
    log_h, log_z = (F.log_softmax(at_least_float32(x), dim=1) for x in (h, z.detach()))
    return (log_h.exp() * (log_h - log_z)).sum(dim=1).mean()


class SSD(AlignUniform):
    r"""Alignment and uniformity with DSR and PD. The projector's output has the length of a representation.

    $$
    \mathcal{L} = \mathcal{A} + \frac{\gamma}{2n} \sum_{v, i} \left\lVert z_i^{(v)} -
    \frac{z_i^{(v)} \odot d_k}{\lVert z_i^{(v)} \odot d_k \rVert} \right\rVert^2
    + \frac{\delta}{2n} \sum_{v, i} \operatorname{KL} \left( \sigma(h_i^{(v)}) \,\|\, \sigma(p_i^{(v)}) \right)
    $$

    with $\mathcal{A}$ the loss of `AlignUniform`, $h_i^{(v)}$, $p_i^{(v)}$ and $z_i^{(v)}$ the representation, the
    projection and the normalized projection of view v of image i, $\sigma$ the softmax, $d_k$ the ``scale`` in the
    dimensions of client k and 1 in others, $\gamma$ the ``separation_weight`` and $\delta$ the
    ``distillation_weight``. The server, which has no dimensions, calibrates without separation.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        hidden_dim: int,
        num_layers: int,
        uniformity_weight: float,
        t: float,
        separation_weight: float,
        distillation_weight: float,
        scale: float,
        share: float,
    ) -> None:
        def projector(dim: int) -> MLP:
            return MLP(dim, hidden_dim=hidden_dim, out_dim=dim, num_layers=num_layers)

        super().__init__(encoder, projector=projector, uniformity_weight=uniformity_weight, t=t)
        self.separation_weight, self.distillation_weight = separation_weight, distillation_weight
        self.scale, self.share = scale, share
        self.scales: Tensor  # d_k
        self.register_buffer("scales", torch.ones(encoder.feature_dim), persistent=False)

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        self.scales.fill_(1.0)  # in place: CUDA graphs use this memory
        if self.client is not None:
            size = max(1, int(self.share * len(self.scales) + 1e-9))  # rounded down: room for 1 / share clients
            begin = self.client % max(1, len(self.scales) // size) * size
            self.scales[begin : begin + size] = self.scale

    def loss(self, views: Views) -> Tensor:
        h = [self.encoder(view) for view in views.images]
        z1, z2 = p = [self.projector(one) for one in h]
        uniformity = (uniformity_loss(z1, t=self.t) + uniformity_loss(z2, t=self.t)) / 2
        separation = sum(dimension_scaled(z, self.scales) for z in p) / 2
        distillation = sum(projector_distillation(*pair) for pair in zip(h, p, strict=True)) / 2
        loss = alignment_loss(z1, z2) + self.uniformity_weight * uniformity
        return loss + self.separation_weight * separation + self.distillation_weight * distillation
