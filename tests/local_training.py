"""Local training for tests, with what most of them do not care about."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedssl.regularizers.base import Regularizer
from fedssl.training import LocalTrainer, options_of
from fedssl.views import Views


class AtOnce:
    """Views by a function that draws what it needs when it makes them."""

    def __init__(self, augment: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.augment = augment

    def __call__(self, images, generator):
        return Views.of(*self.augment(images, generator))

    def sample_params(self, sizes, *, image_shape, device, generator):
        return [generator] * len(sizes)

    def apply(self, images, params, *, layout):
        return Views.of(*(view.contiguous(memory_format=layout) for view in self.augment(images, params)))


def local_training(
    optimizer: torch.optim.Optimizer,
    *,
    augment: Callable[..., tuple[Tensor, Tensor]] = lambda batch, generator: (batch.float(), batch.float()),
    regularizer: Regularizer | None = None,
    epochs: int = 1,
    batch_size: int = 2,
    precision: str = "fp32",
    clip_norm: float | None = None,
    channels_last: bool = True,
) -> LocalTrainer:
    return LocalTrainer(
        augment=AtOnce(augment),
        optimizer=optimizer,
        base_options=options_of(optimizer),
        regularizer=regularizer or Regularizer(),
        epochs=epochs,
        batch_size=batch_size,
        precision=precision,
        clip_norm=clip_norm,
        channels_last=channels_last,
    )
