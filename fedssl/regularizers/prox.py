"""FedProx's proximal term (Li et al., MLSys 2020): mu / 2 ||w - w_0||^2 keeps local training near its start.

w_0 is a detached copy of the weights that training starts from. In the FedProx of two public codes it is a live view
of the very weights being trained, so that the term is always 0.
"""

import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer, Step


def proximal(weights: list[Tensor], start: list[Tensor], *, weight: float) -> Tensor:
    """Squared distance of all ``weights`` from ``start``, times ``weight / 2``.

    Parameters
    ----------
    weights, start : list of Tensor
        Of equal shapes in equal order.
    weight : float
        mu; 0 gives 0.

    Returns
    -------
    Tensor
        Scalar >= 0.
    """
    squares = [(now - then).square().sum() for now, then in zip(weights, start, strict=True)]
    return weight / 2 * torch.stack(squares).sum()


class Proximal(Regularizer):
    """Proximal term over all trained parameters.

    Parameters
    ----------
    weight : float
        mu; 0 turns it off.

    Raises
    ------
    InputError
        If ``weight`` is negative.
    """

    def __init__(self, *, weight: float) -> None:
        if weight < 0:
            raise InputError(
                f"regularizer.weight={weight} must not be negative; FedProx uses 0.001 to 1, 0 turns it off"
            )
        self.weight = weight

    def start(self, method: SSLMethod) -> None:
        """Copy the trained parameters as they are now."""
        self._start = [weights.detach().clone() for weights in _trained(method)]

    def add_to(self, loss: Tensor, step: Step) -> Tensor:
        """Loss with the proximal term added."""
        return loss + proximal(_trained(step.method), self._start, weight=self.weight)


def _trained(method: SSLMethod) -> list[Tensor]:
    return [parameter for parameter in method.parameters() if parameter.requires_grad]
