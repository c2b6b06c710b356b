"""Some of a client's own images, by which it tells models apart before it trains."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedssl.config.settings import DataSettings
from fedssl.evaluation.features import extract
from fedssl.methods.base import SSLMethod
from fedssl.seeding import derive_seed, seed_torch, torch_generator
from fedssl.training import LocalTrainer, batches, index_rows


class LocalDataSample:
    """A client's images; what is drawn of them is the same at every call.

    Parameters
    ----------
    images : Tensor
        All images of the data set, uint8, ``(n, channels, height, width)``.
    indices : Tensor
        Where the client's are, int64, ``(m,)``.
    data : DataSettings
        Tells mean and standard deviation of pixels.
    training : LocalTrainer
        Makes the views, and cuts batches.
    place : tuple of int and str
        Of the client and the round in the run, see `fedssl.seeding`.
    labels : Tensor or None
        Classes of all images, int64, ``(n,)``, for methods that use them.
    on_step_start : callable
        Called before every batch; what it raises ends the choosing.
    """

    def __init__(
        self,
        images: Tensor,
        indices: Tensor,
        *,
        data: DataSettings,
        training: LocalTrainer,
        place: tuple[int | str, ...],
        labels: Tensor | None,
        on_step_start: Callable[[], None],
    ) -> None:
        self._images, self._indices, self._labels, self._on_step_start = images, indices, labels, on_step_start
        self._data, self._training = data, training
        self._seed, self._path = int(place[0]), place[1:]

    def features(self, method: SSLMethod, max_images: int) -> Tensor:
        """What the encoder makes of at most so many images, float32 ``(n, feature_dim)``, on the CPU."""
        self._on_step_start()
        device, span = next(method.parameters()).device, method.encoder.active_stages
        images = index_rows(self._images, self._subset(max_images), device)
        frozen, span.frozen = span.frozen, 0  # all stages that run, whichever are trained
        try:
            return extract(method.encoder, images, mean=self._data.mean, std=self._data.std, device=device)
        finally:
            span.frozen = frozen

    @torch.no_grad()
    def loss(self, method: SSLMethod, max_images: int) -> float:
        """Mean training loss of at most so many images, in training mode; nothing is learned."""
        device = next(method.parameters()).device
        generator, training = torch_generator(self._seed, *self._path, "views"), self._training
        seed_torch(derive_seed(self._seed, *self._path, "loss"), device)
        method.train()
        few, total = self._subset(max_images), 0.0
        for batch in batches(few, training.batch_size, generator=generator, min_batch_size=method.min_batch_size):
            self._on_step_start()
            views = training.augment(index_rows(self._images, batch, device), generator)
            inputs = list(method.inputs(*views))
            if method.frozen:
                inputs = method.encoder.forward_frozen(inputs, generator)
            known = () if self._labels is None else (index_rows(self._labels, batch, device),)
            total += float(method.loss(*inputs, *known)) * len(batch)
        return total / len(few)

    def _subset(self, max_images: int) -> Tensor:
        order = torch.randperm(len(self._indices), generator=torch_generator(self._seed, *self._path, "rows"))
        return self._indices[order[:max_images]]
