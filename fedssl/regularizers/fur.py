"""The flexible uniform regularizer of FedU2 (Liao et al., CVPR 2024): projections spread uniformly over the sphere.

Eq. 2 adds to the local loss the divergence of each view's vectors from random points of the sphere. The divergence is
unbalanced optimal transport (Eqs. 4-6), which leaves points unmatched that are far from all others;
`fedssl.regularizers.optimal_transport` solves it.

Four readings are ours. Eq. 2 uses one Z in both of its terms; Z of the method's own loss is the projection, which the
authors' code uses too. The output of an encoder is often a mean of ReLUs without negative values and cannot be uniform
on a sphere. The paper does not define the masses a and b; they are 1 here. Its cost ||z - s||^2 is about 2 for vectors
of 512 dimensions, above tau_a + tau_b = 1.6, where nothing is transported: the loss would be constant and its gradient
0. The cost here is ``cost_scale`` = 0.5 times that. Eq. 4 is a sum over the batch while losses of methods are means, so
that its share of the gradient would grow with the batch size; ``reduction: mean`` keeps the share of the paper's batch
size, 128.

The authors' code computes a sliced distance in tangent spaces instead of Eq. 4: ``variant: tangent_swd``.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses import at_least_float32
from fedssl.machine.devices import is_gpu
from fedssl.machine.process import one_thread
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer, RegularizerInput, part_or_encoder
from fedssl.regularizers.optimal_transport import coupling, penalties, unmatched

TANGENT_SPACES = 6  # as in the authors' code
LINES_PER_SPACE = 6  # projections in each tangent space
PAPER_BATCH_SIZE = 128  # batch size of the paper


def uot_uniformity(
    z: Tensor,
    *,
    samples: Tensor,
    cost_scale: float = 0.5,
    tau_a: float = 0.8,
    tau_b: float = 0.8,
    max_iter: int = 30,
    tolerance: float = 0.08,
) -> Tensor:
    """Return the unbalanced optimal transport between representations and random points of the sphere (Eq. 4).

    This is the minimum over couplings pi >= 0 of ``sum_ij C_ij pi_ij + tau_a/2 sum_i (sum_j pi_ij - 1)^2 + tau_b/2
    sum_j (sum_i pi_ij - 1)^2`` with ``C_ij = cost_scale ||z_i - s_j||^2``. By the envelope theorem its derivative is
    the one at the optimal pi held fixed: the gradient flows through C only.

    Parameters
    ----------
    z : Tensor
        Representations, ``(batch, dim)``, or several batches, ``(..., batch, dim)``; normalized here.
    samples : Tensor
        Points of the sphere s, ``(..., samples, dim)``, each of length 1.
    cost_scale : float
        Positive. 1 is the paper's cost.
    tau_a, tau_b : float
        Penalty of an unmatched representation, and of an unmatched sample; positive.
    max_iter : int
        Maximum number of solver steps; about 7 are needed.
    tolerance : float
        Estimated relative error of the coupling; see `fedssl.regularizers.optimal_transport.coupling`. With 0.08 the
        cosine of the gradient with the exact one was at least 0.99 and its length within 3%, for 32 to 256 spread or
        collapsed vectors of 128 and 512 dimensions. In float32 less than 0.03 is often not reachable. 0 runs all steps
        without synchronizing with the device.

    Returns
    -------
    Tensor
        One number >= 0 for each batch, ``(...)``; ``(tau_a * batch + tau_b * samples) / 2`` if nothing is transported.
    """
    z = F.normalize(at_least_float32(z), dim=-1)
    with torch.autocast(z.device.type, enabled=False):
        cost = cost_scale * (2 - 2 * z @ samples.to(z.dtype).mT)
        pi = coupling(cost.detach(), tau_a=tau_a, tau_b=tau_b, max_iter=max_iter, tolerance=tolerance).clone()
    price = penalties(unmatched(pi, dim=-1), unmatched(pi, dim=-2), tau_a, tau_b)
    return (cost * pi).sum(dim=(-2, -1)) + price[..., 0, 0]  # Eq. 4


def tangent_swd(z: Tensor, *, samples: Tensor, bases: Tensor, projections: Tensor) -> Tensor:
    """Return the regularizer of FedU2's code: sliced distances in tangent spaces of the sphere, a scalar >= 0.

    With ``log_b`` the logarithm of the sphere at base b, this is the sum over the bases of the mean over k and
    projections p of ``(sort(log_b(z) p)_k - sort(log_b(s) p)_k)^2``, divided by 6. ``z`` are representations, ``(batch,
    dim)``, normalized here for all methods; in the code for SimCLR only. ``samples`` ``(batch, dim)`` and ``bases``
    ``(bases, dim)`` are points of the sphere. The code uses one base per image but divides by the intended 6.
    ``projections`` ``(bases, dim, lines)`` are lines onto which each tangent space is projected, standard normal.
    """
    z = F.normalize(at_least_float32(z), dim=1)
    with torch.autocast(z.device.type, enabled=False):
        difference = _shadows(z, bases, projections) - _shadows(samples.to(z.dtype), bases, projections)
    return difference.square().mean(dim=(1, 2)).sum() / TANGENT_SPACES


class FUR(Regularizer):
    r"""Term that spreads the outputs of a part of the method uniformly over the sphere, for each view (Eq. 2).

    $$
    \mathcal{L} = \ell + \lambda_U \frac{128}{B} \left( \ell_u(Z^1) + \ell_u(Z^2) \right)
    \qquad C_{ij} = c \lVert z_i - s_j \rVert^2
    $$

    $$
    \ell_u(Z) = \min_{\pi \ge 0} \; \sum_{i,j} C_{ij} \pi_{ij}
    + \frac{\tau_a}{2} \sum_i \Big( \sum_j \pi_{ij} - 1 \Big)^2
    + \frac{\tau_b}{2} \sum_j \Big( \sum_i \pi_{ij} - 1 \Big)^2
    $$

    with $z_i$ the normalized outputs of a view, $s_j$ as many random points of the sphere, c the ``cost_scale``, and B
    the images of a batch (the factor 128 / B is 1 with ``reduction="sum"``). Outputs are those of the method's loss,
    before any predictor; Orchestra projects only the rotated view 1.
    """

    def __init__(
        self,
        *,
        weight: float = 0.1,
        variant: str = "uot",
        part: str = "projector",
        reduction: str = "mean",
        cost_scale: float = 0.5,
        tau_a: float = 0.8,
        tau_b: float = 0.8,
        max_iter: int = 30,
        tolerance: float = 0.08,
        gpu_iter: int = 9,
    ) -> None:
        self.part = part if weight else None
        self.weight = weight
        self.variant = variant
        self.reduction = reduction
        self._divergence = partial(uot_uniformity, cost_scale=cost_scale, tau_a=tau_a, tau_b=tau_b)
        self.solver_limits = (max_iter, tolerance)
        self.solver_limits_on_gpu = (gpu_iter, 0.0) if gpu_iter else self.solver_limits
        self.cuda_graph_safe = bool(gpu_iter) or variant == "tangent_swd" or not weight

    def resolve_part(self, method: SSLMethod) -> str | None:
        return part_or_encoder(self.part, method)

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if not step.z:
            return loss
        views = torch.stack(step.z)
        samples = _sphere(views, step.generator)
        if self.variant == "uot":
            with one_thread():  # small operations: synchronizing threads would cost more
                max_iter, tolerance = self.solver_limits_on_gpu if is_gpu(views.device) else self.solver_limits
                terms = self._divergence(views, samples=samples, max_iter=max_iter, tolerance=tolerance)
        else:
            bases = _sphere(views, step.generator)
            lines = _normal((*views.shape, LINES_PER_SPACE), views.device, step.generator)
            spaces = zip(views, samples, bases, lines, strict=True)
            terms = torch.stack([tangent_swd(z, samples=s, bases=b, projections=p) for z, s, b, p in spaces])
        weight = self.weight * PAPER_BATCH_SIZE / len(step.z[0]) if self.reduction == "mean" else self.weight
        return loss + weight * terms.sum()  # Eq. 2


def _sphere(z: Tensor, generator: torch.Generator) -> Tensor:
    """Return random points of the sphere with the shape of z, float32."""
    return F.normalize(_normal(z.shape, z.device, generator), dim=-1)


def _normal(shape: Sequence[int], device: torch.device, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers; on a GPU from torch's generator there, which is seeded for every client."""
    if is_gpu(device):
        return torch.randn(shape, device=device)
    return torch.randn(shape, generator=generator)


def _shadows(x: Tensor, bases: Tensor, projections: Tensor) -> Tensor:
    """Return sorted projections of points x in the tangent space of each base, ``(bases, lines, points)``."""
    cosine = (bases @ x.T).clamp(-1 + 1e-6, 1 - 1e-6)[:, None]  # arccos has no derivative at -1 and 1
    angle = torch.arccos(cosine)
    along = torch.einsum("bd,bdl->bl", bases, projections)[:, :, None]
    # log_b(x) = angle / sin(angle) * (x - cos(angle) b)
    tangent = angle / (1 - cosine.square()).sqrt() * (torch.einsum("nd,bdl->bln", x, projections) - cosine * along)
    return tangent.sort(dim=2).values
