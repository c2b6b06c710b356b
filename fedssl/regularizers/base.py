"""What a regulariser is: a term added to the local loss of any method."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.methods.base import SSLMethod


@dataclass(frozen=True)
class Step:
    """What a regulariser sees of one training step.

    Attributes
    ----------
    method : SSLMethod
        The method that is trained.
    view1, view2 : Tensor
        The two views of the batch as `SSLMethod.loss` gets them.
    z1, z2 : Tensor or None
        What the part named by the regulariser's ``on`` made of them, ``(batch, dim)``, with gradient.
    generator : torch.Generator
        CPU generator of everything random in this training.
    """

    method: SSLMethod
    view1: Tensor
    view2: Tensor
    z1: Tensor | None
    z2: Tensor | None
    generator: torch.Generator


class Regularizer:
    """A term of the local loss; this one adds nothing.

    Attributes
    ----------
    on : str or None
        Part of the method whose outputs the term needs: "encoder" or "projector".
    """

    on: str | None = None

    def start(self, method: SSLMethod) -> None:
        """Prepare for one client's local training, which starts from the model as it is now."""

    def add_to(self, loss: Tensor, step: Step) -> Tensor:
        """The loss with the term added, a scalar."""
        return loss
