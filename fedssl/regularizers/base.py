"""The interface of a regularizer: a term added to the local loss of any method."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.methods.base import SSLMethod


@dataclass(frozen=True)
class RegularizerInput:
    """Values of one training step that a regularizer may use.

    Attributes
    ----------
    method : SSLMethod
        The method that is trained.
    view1, view2 : Tensor
        The two views of the batch as `SSLMethod.loss` gets them.
    z1, z2 : Tensor or None
        Outputs for the two views of the part that `Regularizer.resolve_part` names, ``(batch, dim)``, with gradient; None
        if it names none.
    generator : torch.Generator
        CPU generator of all random numbers in this training.
    """

    method: SSLMethod
    view1: Tensor
    view2: Tensor
    z1: Tensor | None
    z2: Tensor | None
    generator: torch.Generator


class Regularizer:
    """Term of the local loss; this one adds nothing.

    Attributes
    ----------
    part : str or None
        Part of the method whose outputs the term needs: "encoder" or "projector".
    cuda_graph_safe : bool
        Whether `apply` does the same to other numbers in every step of as many images, in memory that stays where it
        is from one `on_train_start` to the next, so that a GPU can record it.
    """

    part: str | None = None
    cuda_graph_safe: bool = True

    def on_train_start(self, method: SSLMethod) -> None:
        """Prepare for one client's local training, which starts from ``method`` as it is now."""

    def resolve_part(self, method: SSLMethod) -> str | None:
        """Part of this method whose outputs the term gets; None: it needs none."""
        return self.part

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        """Loss with the term added, a scalar.

        Parameters
        ----------
        loss : Tensor
            Loss of the method, a scalar.
        step : RegularizerInput
            Values of the training step.
        """
        return loss


class CombinedRegularizer(Regularizer):
    """The term of a regularizer, and one more, which looks at weights alone."""

    cuda_graph_safe = False  # it is made anew for every client

    def __init__(self, first: Regularizer, second: Regularizer) -> None:
        self._first, self._second = first, second

    def on_train_start(self, method: SSLMethod) -> None:
        self._first.on_train_start(method)
        self._second.on_train_start(method)

    def resolve_part(self, method: SSLMethod) -> str | None:
        return self._first.resolve_part(method)

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        return self._second.apply(self._first.apply(loss, step), step)
