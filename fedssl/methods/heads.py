"""Heads, small networks between a representation h and the loss, and the base class of methods with a projector."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.losses.precision import at_least_float32
from fedssl.methods.base import SSLMethod

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": partial(nn.ReLU, inplace=True), "gelu": nn.GELU}


class MLP(nn.Sequential):
    """Linear layers with an activation and, by default, batch normalization between them.

    The papers' heads are special cases: ``num_layers=1`` is the linear head of L-DAWA, ``num_layers=2`` are the
    projectors of SimCLR and BYOL, ``num_layers=3, last_batch_norm=True`` those of SimSiam and MoCo v3.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden_dim: int,
        out_dim: int,
        num_layers: int = 2,
        batch_norm: bool = True,
        last_batch_norm: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        widths = [in_features, *[hidden_dim] * (num_layers - 1), out_dim]
        for before, after in pairwise(widths[:-1]):
            # No bias before a normalization, which would remove it.
            normalization = [nn.BatchNorm1d(after)] if batch_norm else []
            self.extend([nn.Linear(before, after, bias=not batch_norm), *normalization, ACTIVATIONS[activation]()])
        self.append(nn.Linear(widths[-2], out_dim, bias=not last_batch_norm))
        if last_batch_norm:
            self.append(nn.BatchNorm1d(out_dim, affine=False))
        self.out_features = out_dim  # as in torch's layers


class PrototypeHead(nn.Module):
    """Cosines of projections with prototypes: DINO's last layer, weight normalization with a constant gain of 1.

    It maps projections ``(..., in_features)`` to K = ``num_prototypes`` cosines. The weight is stored as it is trained;
    it is normalized in every forward pass.
    """

    def __init__(self, in_features: int, *, num_prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Linear(in_features, num_prototypes, bias=False).weight
        self.out_features = num_prototypes

    def forward(self, z: Tensor) -> Tensor:
        # CPUs would normalize in bfloat16 inside autocast.
        return F.linear(F.normalize(at_least_float32(z), dim=-1), F.normalize(self.weight, dim=1))


def predictor_for(projector: MLP, predictor: Callable[[int], MLP]) -> MLP:
    """Build the predictor of a projector; raise `InputError` if its output has another length than its input."""
    head = predictor(projector.out_features)
    if head.out_features != projector.out_features:
        raise InputError(
            f"method.predictor.out_dim={head.out_features} must equal "
            f"method.projector.out_dim={projector.out_features}, because it predicts projections"
        )
    return head


class ProjectorMethod(SSLMethod):
    """Method with an encoder and a projector.

    ``projector`` builds the projector from the length of a representation, e.g. ``partial(MLP, hidden_dim=512,
    out_dim=128)``.
    """

    def __init__(self, encoder: Encoder, *, projector: Callable[[int], MLP]) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder.feature_dim)

    def project(self, views: Iterable[Tensor]) -> list[Tensor]:
        """Return the projections of each view, ``(batch, dim)``, in separate forward passes."""
        return [self.projector(self.encoder(view)) for view in views]
