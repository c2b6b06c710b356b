"""The flexible uniform regularizer of FedU2 (Liao et al., CVPR 2024): projections spread out over the sphere.

Eq. 2 adds the divergence of either view's vectors from random points of the sphere to the local loss. The divergence
is unbalanced optimal transport (Eqs. 4-6), which leaves unmatched points that are far from all others;
`fedssl.regularizers.optimal_transport` solves it.

Four readings are ours. Eq. 2 has one Z in both of its terms; that of the method's own loss is the projection, which
the authors' code takes too. What an encoder puts out is often a mean of ReLUs, none of whose numbers is below 0, and
cannot be uniform on a sphere. The paper gives no masses a and b; they are 1 here. Its cost ||z - s||^2 is about 2 for
vectors of 512 numbers, above tau_a + tau_b = 1.6, from where on nothing is transported: the loss would be constant and
its gradient 0. The cost here is ``cost_scale`` = 0.5 times that. Eq. 4 is a sum over the batch while losses of methods
are means, so that its share of the gradient would grow with the batch; ``reduction: mean`` keeps it as it is at the
paper's batch of 128.

The authors' code does not compute Eq. 4 but a sliced distance in tangent spaces: ``variant: tangent_swd``.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError
from fedssl.losses import at_least_float32
from fedssl.machine.devices import is_gpu
from fedssl.machine.threads import one_thread
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer, RegularizerInput
from fedssl.regularizers.optimal_transport import coupling, penalties, unmatched

TANGENT_SPACES = 6  # of the authors' code
LINES = 6  # in each tangent space
BATCH = 128  # the paper's


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
    """Unbalanced optimal transport between representations and random points of the sphere (Eq. 4).

    Over couplings pi >= 0 the smallest ``sum_ij C_ij pi_ij + tau_a/2 sum_i (sum_j pi_ij - 1)^2 + tau_b/2 sum_j (sum_i
    pi_ij - 1)^2`` with ``C_ij = cost_scale ||z_i - s_j||^2``. By the envelope theorem its derivative is the one at the
    best pi held fixed: the gradient flows through C only.

    Parameters
    ----------
    z : Tensor
        Representations, ``(batch, dim)``, or several batches, ``(..., batch, dim)``; normalized here.
    samples : Tensor
        Points of the sphere s, ``(..., samples, dim)``, each of length 1.
    cost_scale : float
        Positive. 1 is the paper's cost.
    tau_a, tau_b : float
        Positive: price of an unmatched representation, and sample.
    max_iter : int
        Most steps of the solver, which takes about 7.
    tolerance : float
        Relative error of the coupling, estimated; see `fedssl.regularizers.optimal_transport.coupling`. With 0.08 the cosine of
        the gradient with the exact one was at least 0.99, its length within 3% of the right one, for 32 to 256 spread
        or collapsed vectors of 128 and 512 numbers. In float32 less than 0.03 is often out of reach. 0 takes all steps,
        and never waits for the device to see how far it is.

    Returns
    -------
    Tensor
        One number >= 0 for each batch, ``(...)``; ``(tau_a * batch + tau_b * samples) / 2`` if nothing is worth
        transporting.
    """
    z = F.normalize(at_least_float32(z), dim=-1)
    with torch.autocast(z.device.type, enabled=False):
        cost = cost_scale * (2 - 2 * z @ samples.to(z.dtype).mT)
        pi = coupling(cost.detach(), tau_a=tau_a, tau_b=tau_b, max_iter=max_iter, tolerance=tolerance).clone()
    price = penalties(unmatched(pi, dim=-1), unmatched(pi, dim=-2), tau_a, tau_b)
    return (cost * pi).sum(dim=(-2, -1)) + price[..., 0, 0]  # Eq. 4


def tangent_swd(z: Tensor, *, samples: Tensor, bases: Tensor, projections: Tensor) -> Tensor:
    """Regularizer of FedU2's code: sliced distances in tangent spaces of the sphere.

    With ``log_b`` the logarithm of the sphere at base b, the sum over the bases of the mean over k and projections p of
    ``(sort(log_b(z) p)_k - sort(log_b(s) p)_k)^2``, divided by 6. Unlike in the code z is normalized whatever the
    method; there it is for SimCLR only.

    Parameters
    ----------
    z : Tensor
        Representations, ``(batch, dim)``; normalized here.
    samples : Tensor
        Points of the sphere, ``(batch, dim)``, each of length 1.
    bases : Tensor
        Where the tangent spaces touch, ``(bases, dim)``, each of length 1. The code takes as many as there are images
        but divides by the 6 that were meant.
    projections : Tensor
        Lines onto which each tangent space is projected, ``(bases, dim, lines)``, standard normal.

    Returns
    -------
    Tensor
        Scalar >= 0.
    """
    z = F.normalize(at_least_float32(z), dim=1)
    with torch.autocast(z.device.type, enabled=False):
        difference = _shadows(z, bases, projections) - _shadows(samples.to(z.dtype), bases, projections)
    return difference.square().mean(dim=(1, 2)).sum() / TANGENT_SPACES


class FUR(Regularizer):
    """Term that spreads what a part of the method makes of either view over the sphere (Eq. 2).

    Parameters
    ----------
    weight : float
        lambda_U; 0 turns it off.
    variant : {"uot", "tangent_swd"}
        "uot": Eq. 4. "tangent_swd": the authors' code, which has ``weight=0.01``; parameters of `uot_uniformity` mean
        nothing.
    part : {"projector", "encoder"}
        Part of the method whose outputs are spread; of a method without a projector (supervised) it is the encoder. Its
        outputs are those of the method's loss, before any predictor; Orchestra projects view 1 turned by quarters only.
    reduction : {"mean", "sum"}
        "sum": the paper's. "mean": 128 / batch times that, 128 being the paper's batch.
    cost_scale, tau_a, tau_b, tolerance : float
        As in `uot_uniformity`.
    max_iter : int
        As in `uot_uniformity`.
    gpu_iter : int
        Steps of the solver on a GPU, which takes them all whatever ``tolerance`` says: to see how far it is, the
        process would have to wait for it after every step. 0: it waits.

    Raises
    ------
    InputError
        If a number is out of range or a word is another one.
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
        if weight < 0:
            raise InputError(f"regularizer.weight={weight} must not be negative; FedU2 uses 0.1, 0 turns it off")
        for name, word, allowed in (
            ("variant", variant, ("uot", "tangent_swd")),
            ("part", part, ("projector", "encoder")),
            ("reduction", reduction, ("mean", "sum")),
        ):
            if word not in allowed:
                choices = " or ".join(f"regularizer.{name}={choice}" for choice in allowed)
                raise InputError(f"regularizer.{name}={word} is unknown; set {choices}")
        for name, number in (("cost_scale", cost_scale), ("tau_a", tau_a), ("tau_b", tau_b), ("max_iter", max_iter)):
            if number <= 0:
                raise InputError(f"regularizer.{name}={number} must be positive; see conf/regularizer/fur.yaml")
        if tolerance < 0:
            raise InputError(f"regularizer.tolerance={tolerance} must not be negative; 0 takes all steps")
        if gpu_iter < 0:
            raise InputError(f"regularizer.gpu_iter={gpu_iter} must not be negative; 0 waits for the GPU at every step")
        self.part = part if weight else None
        self.weight = weight
        self.variant = variant
        self.reduction = reduction
        self._divergence = partial(uot_uniformity, cost_scale=cost_scale, tau_a=tau_a, tau_b=tau_b)
        self.solver_limits = (max_iter, tolerance)
        self.solver_limits_on_gpu = (gpu_iter, 0.0) if gpu_iter else self.solver_limits
        self.cuda_graph_safe = bool(gpu_iter) or variant == "tangent_swd" or not weight

    def resolve_part(self, method: SSLMethod) -> str | None:
        """The part that was chosen, or the encoder where it is a projector and there is none."""
        parts = [name for name, _ in method.named_children()]
        return "encoder" if self.part == "projector" and "projector" not in parts else self.part

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        """Loss with the divergence of both views added."""
        if step.z1 is None or step.z2 is None:
            return loss
        views = torch.stack((step.z1, step.z2))
        samples = _sphere(views, step.generator)
        if self.variant == "uot":
            with one_thread():  # many small operations, after each of which threads would wait for each other
                max_iter, tolerance = self.solver_limits_on_gpu if is_gpu(views.device) else self.solver_limits
                terms = self._divergence(views, samples=samples, max_iter=max_iter, tolerance=tolerance)
        else:
            bases = _sphere(views, step.generator)
            lines = _normal((*views.shape, LINES), views.device, step.generator)
            spaces = zip(views, samples, bases, lines, strict=True)
            terms = torch.stack([tangent_swd(z, samples=s, bases=b, projections=p) for z, s, b, p in spaces])
        weight = self.weight * BATCH / len(step.z1) if self.reduction == "mean" else self.weight
        return loss + weight * terms.sum()  # Eq. 2


def _sphere(z: Tensor, generator: torch.Generator) -> Tensor:
    """Random points of the sphere, as many and of as many numbers as there are vectors in z, float32."""
    return F.normalize(_normal(z.shape, z.device, generator), dim=-1)


def _normal(shape: Sequence[int], device: torch.device, generator: torch.Generator) -> Tensor:
    """Standard normal numbers; a GPU draws them itself, from torch's generator there, which every client seeds."""
    if is_gpu(device):
        return torch.randn(shape, device=device)
    return torch.randn(shape, generator=generator)


def _shadows(x: Tensor, bases: Tensor, projections: Tensor) -> Tensor:
    """Sorted projections of points x of the sphere in the tangent space of every base, ``(bases, lines, points)``."""
    cosine = (bases @ x.T).clamp(-1 + 1e-6, 1 - 1e-6)[:, None]  # at the ends the angle has no derivative
    angle = torch.arccos(cosine)
    along = torch.einsum("bd,bdl->bl", bases, projections)[:, :, None]
    # log_b(x) = angle / sin(angle) * (x - cos(angle) b)
    tangent = angle / (1 - cosine.square()).sqrt() * (torch.einsum("nd,bdl->bln", x, projections) - cosine * along)
    return tangent.sort(dim=2).values
