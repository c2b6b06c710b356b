"""Base class of regularizers: a term added to the local loss of any method."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    equal_global_sizes: bool = False  # whether it concatenates these views, which then need one size
    # Whether it uses the encoder as before the first round, see `SSLMethod.keep_initial_encoder`.
    uses_initial_encoder: bool = False
    # Whether it can be used if a schedule trains stages of the encoder and freezes them later. The images of the views
    # are then the output of these stages.
    supports_frozen_stages: bool = True
    # Whether `apply` runs the same operations in every step with the same batch size, on memory that does not move
    # until the next `on_train_start`, so that CUDA graphs can capture it.
    cuda_graph_safe: bool = True

    @property
    def terms(self) -> "Sequence[Regularizer]":
        """Return the terms that it adds."""
        return (self,)

    def on_train_start(self, method: SSLMethod) -> None:
        """Prepare for one client's local training, which starts from the current ``method``."""

    def resolve_part(self, method: SSLMethod) -> str | None:
        """Return the part of this method whose outputs the term needs; None if it needs none."""
        return self.part

    def copied_bytes(self, method: SSLMethod) -> int:
        """Return the memory of the copies of networks and weights that the term uses during training."""
        return 0

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        """Return the loss with the term added, a scalar."""
        return loss


def part_or_encoder(part: str | None, method: SSLMethod) -> str | None:
    """Return the part, or the encoder in place of the projector of a method without one."""
    parts = [name for name, _ in method.named_children()]
    return "encoder" if part == "projector" and "projector" not in parts else part


class CombinedRegularizer(Regularizer):
    """The sum of two terms, which use the outputs of the same part, or of none."""

    def __init__(self, first: Regularizer, second: Regularizer) -> None:
        self._terms = (first, second)
        self.num_views = max(first.num_views, second.num_views)
        self.uses_initial_encoder = first.uses_initial_encoder or second.uses_initial_encoder
        self.supports_frozen_stages = first.supports_frozen_stages and second.supports_frozen_stages
        self.cuda_graph_safe = first.cuda_graph_safe and second.cuda_graph_safe

    @property
    def terms(self) -> Sequence[Regularizer]:
        return [term for both in self._terms for term in both.terms]

    def on_train_start(self, method: SSLMethod) -> None:
        for term in self._terms:
            term.on_train_start(method)

    def resolve_part(self, method: SSLMethod) -> str | None:
        parts = (term.resolve_part(method) for term in self._terms)
        return next((part for part in parts if part is not None), None)

    def copied_bytes(self, method: SSLMethod) -> int:
        return sum(term.copied_bytes(method) for term in self._terms)

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        for term in self._terms:
            z = step.z[: term.num_views] if term.resolve_part(step.method) else ()
            loss = term.apply(loss, replace(step, z=z))
        return loss
