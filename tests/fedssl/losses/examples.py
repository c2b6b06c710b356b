"""A call of every loss, for tests of all."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses import (
    at_least_float32,
    barlow_twins,
    barlow_twins_unbiased,
    byol,
    dino,
    feature_mse,
    ijepa,
    info_nce,
    masked_reconstruction,
    masked_tokens,
    nt_xent,
    nt_xent_one_sided,
    relational,
    sigreg,
    similarity_distillation,
    sinkhorn,
    swav,
    teacher_distance,
    vicreg,
)


def directions() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def center(z: Tensor) -> Tensor:
    return torch.linspace(-1, 1, z.shape[-1], device=z.device)


def unit(z: Tensor) -> Tensor:
    return F.normalize(at_least_float32(z), dim=1)


def patch_weights(z: Tensor) -> Tensor:
    """Weights of the patches of two images of eight, of which three are masked."""
    return (torch.arange(16, device=z.device) % 3 == 0) / 6


SHARP = {"student_temperature": 0.3, "teacher_temperature": 0.2}
# Of two tensors (16, 32).
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nt_xent": lambda a, b: nt_xent(a, b, temperature=0.07),
    "nt_xent_one_sided": lambda a, b: nt_xent_one_sided(a, b, temperature=0.07),
    "info_nce": lambda a, b: info_nce(a, b, temperature=0.07),
    "relational": lambda a, b: relational(a, b, a, temperature=0.1),
    "byol": lambda a, b: byol(a, b, b, a),
    "barlow_twins": lambda a, b: barlow_twins(a, b, lambd=0.005),
    "barlow_twins_unbiased": lambda a, b: barlow_twins_unbiased(a, b, lambd=0.005),
    "vicreg": lambda a, b: vicreg(a, b / 2),
    "vicreg of few features": lambda a, b: vicreg(a[:, :8], b[:, :8]),
    "dino": lambda a, b: dino((a, b, a.flip(0)), (b, a), center=center(a), **SHARP),
    "masked_tokens": lambda a, b: masked_tokens(a, b, patch_weights(a), center=center(a), **SHARP),
    "swav": lambda a, b: swav((a, b), (sinkhorn(a, epsilon=0.5, iterations=3),), temperature=0.1),
    "sigreg": lambda a, b: sigreg(torch.stack((a, b)), slices=8, generator=directions()),
    "masked_reconstruction": lambda a, b: masked_reconstruction(a.view(2, 8, 32), b.view(2, 8, 32)),
    "teacher_distance": teacher_distance,
    "feature_mse": feature_mse,
    "similarity_distillation": lambda a, b: similarity_distillation(a, b, unit(b.flip(0)), **SHARP),
    "ijepa": lambda a, b: ijepa(a.view(2, 2, 4, 32), b.view(2, 2, 4, 32)),
}
