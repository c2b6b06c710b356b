"""A client in a round: its images, state and plans, and the sample of images on which it compares models."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedssl.config.settings import DataSettings
from fedssl.datasets.images import ImageSource
from fedssl.evaluation.features import extract
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import check_loaded
from fedssl.seeding import derive_seed, seed_generators, torch_generator
from fedssl.training import LocalTrainer, batches, index_rows, method_inputs, on_device
from fedssl.wire.messages import TrainPlan
from strategies.types import ClientState


@dataclass(frozen=True, kw_only=True)
class ClientRound:
    """One round of a client: its images, its state, and the plan, completed by the layers that it cached."""

    client: int  # partition id; for a client without a partition, its number in seeds
    indices: torch.Tensor  # of its images, int64, (n,)
    state: ClientState | None
    state_round: int  # after which the state was saved; 0 without a state
    plans: tuple[TrainPlan, ...]  # one for each model among which it selects; they differ only in their layers
    model_index: int = 0  # of the selected plan
    on_step_start: Callable[[], None] = lambda: None

    @property
    def plan(self) -> TrainPlan:
        return self.plans[self.model_index]


class LocalDataSample:
    """Local images of a client. Every call draws the same sample.

    ``images`` and ``labels``, int64 ``(n,)``, are those of the whole data set, and ``indices``, int64 ``(m,)``, those
    of the client. ``on_step_start`` is called before every batch; its exception aborts the comparison.
    """

    def __init__(
        self,
        images: ImageSource,
        indices: Tensor,
        *,
        data: DataSettings,
        training: LocalTrainer,
        seed_path: tuple[int | str, ...],
        labels: Tensor | None,
        on_step_start: Callable[[], None],
    ) -> None:
        self._images, self._indices, self._labels, self._on_step_start = images, indices, labels, on_step_start
        self._data, self._training = data, training
        self._seed, self._path = int(seed_path[0]), seed_path[1:]

    def features(self, method: SSLMethod, max_images: int) -> Tensor:
        """Return the encoder's features of at most ``max_images`` images, float32 ``(n, feature_dim)``, on the CPU."""
        self._on_step_start()
        device, encoder = next(method.parameters()).device, method.encoder
        images = self._images.subset(self._subset(max_images))
        with encoder.run_stages(replace(encoder.active_stages, frozen=0)):  # the frozen stages included
            return extract(encoder, images, mean=self._data.mean, std=self._data.std, device=device)

    @torch.no_grad()
    def loss(self, method: SSLMethod, max_images: int) -> float:
        """Return the mean loss of at most ``max_images`` images in training mode, without an optimizer step."""
        check_loaded(method)
        device = next(method.parameters()).device
        generator, training = torch_generator(self._seed, *self._path, "views"), self._training
        seed_generators(derive_seed(self._seed, *self._path, "loss"), device)
        method.train()
        few = self._subset(max_images)
        losses, sizes = [], []
        targets = method.targets(self._images, few, on_step_start=self._on_step_start)
        rows = list(batches(few, training.batch_size, generator=generator, min_batch_size=method.min_batch_size))
        for batch, images in zip(rows, self._images.prefetch(rows), strict=True):
            self._on_step_start()
            images = on_device(images, device)
            views = training.augment(images, generator)
            if targets is not None:
                views = replace(views, targets=targets(batch, images))
            labels = None if self._labels is None else index_rows(self._labels, batch, device)
            losses.append(method.loss(method_inputs(method, views, labels, generator)))
            sizes.append(len(batch))
        found: list[float] = torch.stack(losses).tolist()  # one synchronization
        return sum(loss * size for loss, size in zip(found, sizes, strict=True)) / len(few)

    def _subset(self, max_images: int) -> Tensor:
        order = torch.randperm(len(self._indices), generator=torch_generator(self._seed, *self._path, "rows"))
        return self._indices[order[:max_images]]
