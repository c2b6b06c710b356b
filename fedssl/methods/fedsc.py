"""FedSC (Jing et al., ICML 2024): spectral contrastive learning with correlation matrices of the other clients.

The spectral contrastive loss (HaoChen et al., NeurIPS 2021, arXiv 2106.04156) repels all pairs of images, those of two
clients included, and needs no more of another client than its correlation matrix R = Z'Z / 2B. Transcribed from the
authors' code; the paper's equations are unverified.

A client uploads R, the mean over the batches of its round, and the server sends the mean over the clients of the last
round, from which a client of that round subtracts its own. With ``strategy=gossip`` it is the mean over the client and
its neighbors, of the last round of the client. Differences from the authors' code: they compute R in a
separate pass over all images before a round, also for clients that have not trained lately, and optionally add noise.
Here it costs no pass, and is that of the model during the client's training. If the server drops an update, repeats the
round, or gets it after the round (``aggregation.buffered=true``), its client subtracts a matrix that the mean lacks.
With ``strategy=per_ssl`` the personalized model subtracts its own matrix from the mean, which has that of the shared
model. R reveals second moments of projections.
"""

from collections.abc import Callable, Sequence
from statistics import median_high

import numpy as np
import torch
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32
from fedssl.losses.precision import product
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.views import Views

# Buffers. The server's mean, the number of its clients and its round; what a client uploads, with the round; and what
# it keeps: the sum over the steps of a round, their number, and the last round.
MEAN, CLIENTS, MEAN_ROUND, OWN, OWN_ROUND, SUM, STEPS, LAST = (
    *("mean_correlation", "correlation_clients", "mean_correlation_round", "own_correlation", "own_correlation_round"),
    *("correlation_sum", "correlation_steps", "correlation_round"),
)


def clip_norm(z: Tensor, *, square: float) -> Tensor:
    """Shorten vectors ``(batch, dim)`` whose squared norm is above ``square`` to that norm."""
    z = at_least_float32(z)
    shortened: Tensor = z * (square**0.5 / z.norm(dim=1, keepdim=True).clamp(min=square**0.5))
    return shortened


def correlation(z1: Tensor, z2: Tensor) -> Tensor:
    """Return R = Z'Z / 2B of the vectors of both views, each ``(batch, dim)``."""
    z = torch.cat((z1, z2))
    r: Tensor = product(z.T, z) / len(z)
    return r


def spectral_loss(z1: Tensor, z2: Tensor, others: Tensor, *, own_share: Tensor) -> Tensor:
    """Return ``-2 mean(z1 . z2) + a |R|^2 + 2 (1 - a) <R, others>``, with a the ``own_share`` of the own images.

    ``others`` is the mean correlation matrix of other clients, ``(dim, dim)``, without gradient. With ``own_share`` 1
    it has no effect, and the loss is that of spectral contrastive learning.
    """
    r = correlation(z1, z2)
    repulsion = own_share * r.square().sum() + 2 * (1 - own_share) * (r * others).sum()
    return repulsion - 2 * (z1 * z2).sum(dim=1).mean()


def limit_norm(matrix: np.ndarray, limit: float) -> np.ndarray:
    """Scale a matrix to the Frobenius norm ``limit`` if its own is larger, apart from rounding; R has at most mu."""
    norm = np.linalg.norm(matrix.astype(np.float64))
    return matrix if norm <= 1.01 * limit else matrix * matrix.dtype.type(limit / norm)


class FedSC(ProjectorMethod):
    r"""FedSC with an encoder and a projector. Each view has a separate forward pass.

    A batch needs at least three images: batch normalization maps any two images to 1 and -1.

    $$
    \mathcal{L}_k = -\frac{2}{B} \sum_{i=1}^{B} \langle z_i^{(1)}, z_i^{(2)} \rangle
    + \alpha \lVert R_k \rVert_F^2 + 2 (1 - \alpha) \langle R_k, \bar{R}_{-k} \rangle \qquad
    R_k = \frac{1}{2B} Z_k^\top Z_k
    $$

    with $z_i^{(v)}$ the projection of view v of image i, shortened to $\lVert z \rVert^2 \le \mu$ (``max_square``),
    $Z_k$ those of both views, $\bar{R}_{-k}$ the mean matrix of the other clients, and $\alpha$ falling linearly from 1
    to ``own_share`` over the rounds; 1 without other clients.
    """

    min_batch_size = 3
    follows_rounds = True
    uploaded_parts = (OWN, OWN_ROUND)
    broadcast_parts = (MEAN, CLIENTS, MEAN_ROUND)
    _alpha: Tensor
    _others: Tensor

    def __init__(
        self, encoder: Encoder, *, projector: Callable[[int], MLP], max_square: float, own_share: float
    ) -> None:
        super().__init__(encoder, projector=projector)
        self.max_square, self.own_share = max_square, own_share
        dim = self.projector.out_features
        for name in (MEAN, OWN, SUM):
            self.register_buffer(name, torch.zeros(dim, dim))
        for name in (CLIENTS, MEAN_ROUND, OWN_ROUND, STEPS, LAST):
            self.register_buffer(name, torch.zeros(()))
        for name in (SUM, STEPS, LAST):
            self.keep_local(name)
        self.register_buffer("_alpha", torch.ones(()), persistent=False)  # both change in place, for CUDA graphs
        self.register_buffer("_others", torch.zeros(dim, dim), persistent=False)

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        buffers = dict(self.named_buffers(recurse=False))
        mean, total, steps = buffers[MEAN], buffers[SUM], buffers[STEPS]
        clients = buffers[CLIENTS]
        was_there = (buffers[LAST] == buffers[MEAN_ROUND]) & (steps > 0)  # without branches, for which a GPU would wait
        without_own = (clients * mean - total / steps.clamp(min=1)) / (clients - 1).clamp(min=1)
        self._others.copy_(torch.where(was_there & (clients > 1), without_own, mean))
        progress = (self.round - 1) / max(self.rounds - 1, 1)
        self._alpha.copy_(torch.where(clients > was_there, 1 - (1 - self.own_share) * progress, 1.0))
        total.zero_()
        steps.zero_()
        buffers[LAST].fill_(self.round)

    def loss(self, views: Views) -> Tensor:
        z1, z2 = (clip_norm(z, square=self.max_square) for z in self.project(views.images))
        self.get_buffer(SUM).add_(correlation(z1.detach(), z2.detach()))
        self.get_buffer(STEPS).add_(1)
        return spectral_loss(z1, z2, self._others, own_share=self._alpha)

    def parts_to_upload(self, layers: Layers) -> Layers:
        return {OWN: np.asarray(layers[SUM] / max(layers[STEPS], np.float32(1))), OWN_ROUND: layers[LAST].copy()}

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        """Average the matrices, each with at most the norm of an honest client's."""
        matrices = [limit_norm(layers[OWN], self.max_square) for layers in uploaded]
        mean = np.mean(matrices, axis=0, dtype=np.float64)
        dtype, last = broadcast[MEAN].dtype, median_high(float(layers[OWN_ROUND]) for layers in uploaded)
        return {
            MEAN: mean.astype(dtype),
            CLIENTS: np.array(len(uploaded), dtype),
            MEAN_ROUND: np.array(last, dtype),
        }
