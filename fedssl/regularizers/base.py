"""Base class of regularizers: a term added to the local loss of any method."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.methods.base import SSLMethod
from fedssl.views import Views


@dataclass(frozen=True)
class RegularizerInput:
    """Values of one training step that a regularizer may use."""

    method: SSLMethod
    views: Views  # as passed to `SSLMethod.loss`
    # Output of `Regularizer.resolve_part` for the first `Regularizer.num_views` views, each ``(batch, dim)``, with
    # gradient; empty without a part.
    z: tuple[Tensor, ...]
    generator: torch.Generator  # CPU generator of all random numbers of local training


class Regularizer:
    """Term of the local loss; the base class adds nothing."""

    part: str | None = None  # part of the method whose outputs the term needs: "encoder" or "projector"
    num_views: int = 2  # number of views, the first global ones, for which it needs them
    # Whether it uses the encoder as before the first round, see `SSLMethod.keep_initial_encoder`.
    uses_initial_encoder: bool = False
    # Whether it can be used if a schedule trains stages of the encoder and freezes them later. The images of the views
    # are then the output of these stages.
    supports_frozen_stages: bool = True
    # Whether `apply` runs the same operations in every step with the same batch size, on memory that does not move
    # until the next `on_train_start`, so that CUDA graphs can capture it.
    cuda_graph_safe: bool = True

    def on_train_start(self, method: SSLMethod) -> None:
        """Prepare for one client's local training, which starts from the current ``method``."""

    def resolve_part(self, method: SSLMethod) -> str | None:
        """Return the part of this method whose outputs the term needs; None if it needs none."""
        return self.part

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        """Return the loss with the term added, a scalar."""
        return loss


class CombinedRegularizer(Regularizer):
    """The term of a regularizer plus a second one that depends on weights alone."""

    cuda_graph_safe = False  # each client builds a new one

    def __init__(self, first: Regularizer, second: Regularizer) -> None:
        self._first, self._second = first, second

    def on_train_start(self, method: SSLMethod) -> None:
        self._first.on_train_start(method)
        self._second.on_train_start(method)

    def resolve_part(self, method: SSLMethod) -> str | None:
        return self._first.resolve_part(method)

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        return self._second.apply(self._first.apply(loss, step), step)
