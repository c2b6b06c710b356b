"""Alignment: the representation of one view stays close to the received encoder's representation of the other.

LW-FedSSL (Tun et al., arXiv 2401.11647, Eq. 3) measures closeness by InfoNCE, FeatARC (Wang et al., ICLR 2023, arXiv
2210.10947, section 5) by the cosine. LW-FedSSL does not say whether representations are normalized; here they are. The
code of FeatARC compares the projection of a view with the received encoder's representation of the image itself,
which needs projections as long as representations; the paper, and this, compare representations with representations.
"""

import copy

import torch
from torch import Tensor, nn

from fedssl.errors import InputError
from fedssl.losses import info_nce, negative_cosine
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer, RegularizerInput


def alignment(
    z1: Tensor, z2: Tensor, g1: Tensor, g2: Tensor, *, distance: str = "info_nce", temperature: float = 0.2
) -> Tensor:
    """Distance of local representations from the received encoder's representations of the other view.

    Parameters
    ----------
    z1, z2 : Tensor
        Local representations of the two views, ``(batch, dim)``; need not be normalized.
    g1, g2 : Tensor
        Representations of the received encoder, ``(batch, dim)``, without gradient.
    distance : {"info_nce", "cosine"}
        "info_nce": ``l(z1, g2) + l(z2, g1)`` with l as in `fedssl.losses.info_nce`. "cosine": the mean of
        ``-cos(z1, g2)`` and ``-cos(z2, g1)``.
    temperature : float
        Positive; of InfoNCE.

    Returns
    -------
    Tensor
        Scalar >= 0, or in [-1, 1] for the cosine.
    """
    if distance == "cosine":
        return (negative_cosine(z1, g2) + negative_cosine(z2, g1)) / 2
    return info_nce(z1, g2, temperature=temperature) + info_nce(z2, g1, temperature=temperature)  # Eq. 3


class Alignment(Regularizer):
    """Term that aligns the encoder with a frozen copy, in eval mode, of the one that training starts from.

    The start is the received global encoder, unless the strategy lets clients keep parts of their own (FedU, FedBN).

    Parameters
    ----------
    weight : float
        alpha of LW-FedSSL; 0 turns it off.
    distance : {"info_nce", "cosine"}
        As in `alignment`.
    temperature : float
        Positive; of InfoNCE.

    Raises
    ------
    InputError
        If a number is out of range or ``distance`` is another word.
    """

    def __init__(self, *, weight: float = 0.01, distance: str = "info_nce", temperature: float = 0.2) -> None:
        if weight < 0:
            raise InputError(f"regularizer.weight={weight} must not be negative; LW-FedSSL uses 0.01, 0 turns it off")
        if distance not in ("info_nce", "cosine"):
            raise InputError(
                f"regularizer.distance={distance} is unknown; "
                "set regularizer.distance=info_nce or regularizer.distance=cosine"
            )
        if temperature <= 0:
            raise InputError(f"regularizer.temperature={temperature} must be positive; LW-FedSSL uses 0.2")
        self.part = "encoder" if weight else None
        self.weight = weight
        self.distance = distance
        self.temperature = temperature
        self.received: nn.Module | None = None

    def on_train_start(self, method: SSLMethod) -> None:
        """Copy the encoder as it is now."""
        if not self.weight:
            return
        if self.received is None:
            self.received = copy.deepcopy(method.encoder).requires_grad_(False).eval()
        else:
            self.received.load_state_dict(method.encoder.state_dict())

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        """Loss with the distance from the copy's representations added."""
        if self.received is None or step.z1 is None or step.z2 is None:
            return loss
        with torch.no_grad():
            g1, g2 = self.received(torch.cat((step.view1, step.view2))).chunk(2)
        term = alignment(step.z1, step.z2, g1, g2, distance=self.distance, temperature=self.temperature)
        return loss + self.weight * term
