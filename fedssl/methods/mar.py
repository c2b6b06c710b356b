"""MAR (Chen et al., ICLR 2026, arXiv 2607.02447): MAE whose latents stay near those of all clients.

A client uploads its latents, averaged over its batches: one mean per place in a batch. The server averages them over
the clients of the round (Algorithm 1), and their distance from a batch's latents is a term of the loss in the next
round. The equations are the paper's. Its code compares all visible tokens, one dimension at a time, and its means count
the diagonal. These choices are ours:

- The latent of an image is the representation of its visible patches, which the paper leaves open.
- The kernel has the squared distance of the text and of the code; Eq. 6's sentence writes it without the square.
- Eq. 7 counts a client's rounds; here a round counts for all clients, which is the same in expectation and needs no
  client state.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32, masked_reconstruction
from fedssl.losses.precision import product
from fedssl.methods.mae import MAE
from fedssl.methods.patch_prediction import encode_visible
from fedssl.views import Views

LOCAL_LATENTS, LATENTS = "local_latents", "latents"


def adaptive_mmd(z: Tensor, reference: Tensor) -> Tensor:
    """Return the unbiased squared maximum mean discrepancy of ``(batch, dim)`` and ``(m, dim)`` vectors, a scalar.

    The bandwidth of the Gaussian kernel is the mean distance of two of the ``batch`` vectors, at least two, without
    gradient. Rows of zeros of ``reference`` are empty; with fewer than two others the result is 0. It may be negative.
    """
    z, batch = at_least_float32(z), len(z)
    reference = reference.to(z.dtype)
    present = reference.any(dim=1).to(z.dtype)
    count = present.sum()
    within = _squared_distances(z, z)
    bandwidth = _sum_of_others(within.detach().sqrt()) / (batch * (batch - 1))
    scale = 2 * bandwidth.square().clamp_min(1e-8)  # equal vectors have no bandwidth
    own = _sum_of_others((-within / scale).exp()) / (batch * (batch - 1))
    kernel = (-_squared_distances(reference, reference) / scale).exp() * present * present[:, None]
    others = _sum_of_others(kernel) / (count * (count - 1)).clamp_min(1)
    both = ((-_squared_distances(z, reference) / scale).exp() * present).sum() / (batch * count.clamp_min(1))
    return torch.where(count > 1, own + others - 2 * both, 0.0)  # Eq. 6


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    return (x.square().sum(dim=1)[:, None] + y.square().sum(dim=1) - 2 * product(x, y.T)).clamp_min(0)


def _sum_of_others(values: Tensor) -> Tensor:
    """Return the sum of a square matrix without its diagonal."""
    return values.sum() - values.diagonal().sum()


def mean_latents(uploaded: Sequence[np.ndarray], current: np.ndarray) -> np.ndarray:
    """Return the mean of the clients' latents ``(m, dim)``, each row over the clients that have it.

    Rows of zeros are empty. A row that no client has keeps its ``current`` value.
    """
    stacked = np.stack(uploaded).astype(np.float64)
    count = stacked.any(axis=2).sum(axis=0)[:, None]
    mean = stacked.sum(axis=0) / np.maximum(count, 1)
    return np.where(count > 0, mean, current).astype(current.dtype)


class MAR(MAE):
    r"""MAE with an alignment of local and global latents.

    Besides MAE's parts there are ``local_latents`` and ``latents``, both ``(num_latents, feature_dim)``, in which rows
    of zeros are empty.

    $$
    \mathcal{L} = \mathcal{L}_{\text{MAE}} + \gamma_t \left( \frac{1}{B (B - 1)} \sum_{a \ne b} k(z_a, z_b) +
    \frac{1}{M (M - 1)} \sum_{a \ne b} k(\bar{z}_a, \bar{z}_b) - \frac{2}{B M} \sum_{a, b} k(z_a, \bar{z}_b) \right)
    $$

    $$
    k(z, z') = \exp \left( -\frac{\lVert z - z' \rVert^2}{2 \sigma^2} \right) \qquad
    \sigma = \frac{1}{B (B - 1)} \sum_{a \ne b} \lVert z_a - z_b \rVert \qquad
    \gamma_t = \gamma_{\min} + \frac{\gamma_{\max} - \gamma_{\min}}{2} \left( 1 + \cos \frac{\pi (t - 1)}{T} \right)
    $$

    with $z_a$ the latents of the B images of a batch, $\bar{z}_b$ the M = ``num_latents`` latents of the last round's
    clients, t the round and T the number of rounds. Round 1 has no global latents and is MAE.
    """

    min_batch_size = 2  # the bandwidth is a mean over pairs
    follows_rounds = True
    uploaded_parts = (LOCAL_LATENTS,)
    broadcast_parts = (LATENTS,)
    local_latents: Tensor
    latents: Tensor
    _gamma: Tensor
    _counts: Tensor

    def __init__(
        self,
        encoder: Encoder,
        *,
        decoder_width: int,
        decoder_depth: int,
        decoder_heads: int,
        gamma_max: float,
        gamma_min: float,
        num_latents: int,
        normalize_patches: bool = True,
        exchange_decoder: bool = True,
    ) -> None:
        super().__init__(
            encoder,
            decoder_width=decoder_width,
            decoder_depth=decoder_depth,
            decoder_heads=decoder_heads,
            normalize_patches=normalize_patches,
            exchange_decoder=exchange_decoder,
        )
        self.gamma_max, self.gamma_min = gamma_max, gamma_min
        for name in (LOCAL_LATENTS, LATENTS):
            self.register_buffer(name, torch.zeros(num_latents, encoder.feature_dim))
        self.register_buffer("_gamma", torch.zeros(()), persistent=False)  # changes in place, for CUDA graphs
        self.register_buffer("_counts", torch.zeros(num_latents, 1), persistent=False)

    @property
    def gamma(self) -> float:
        """Weight of the alignment in the current round."""
        decay = (1 + math.cos(math.pi * (self.round - 1) / self.rounds)) / 2
        return self.gamma_min + (self.gamma_max - self.gamma_min) * decay  # Eq. 7

    def loss(self, views: Views) -> Tensor:
        tokens, mask = encode_visible(self.encoder, views[0])
        prediction, patches = self.decode(views[0], tokens, mask)
        reconstruction = masked_reconstruction(prediction, patches, normalize=self.normalize_patches)
        z = self.encoder.pool_tokens(tokens)
        with torch.no_grad():
            rows = z[: len(self.latents)]
            self.local_latents[: len(rows)] += rows
            self._counts[: len(rows)] += 1
        return reconstruction + self._gamma * adaptive_mmd(z, self.latents)  # Eq. 5

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        self._gamma.fill_(self.gamma)
        self.local_latents.zero_()
        self._counts.zero_()

    def end_round(self) -> None:
        super().end_round()
        self.local_latents /= self._counts.clamp_min(1)

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        return {LATENTS: mean_latents([layers[LOCAL_LATENTS] for layers in uploaded], broadcast[LATENTS])}
