"""Training of a linear classifier by steps of an optimiser: what fine-tuning and the papers' linear probes share.

The classifier begins with zeros. Batches are drawn anew in every epoch, all images are in one, and the number that
counts is that of the last epoch: test images come after training, and take no part in it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fedssl.augmentation import Augmentation
from fedssl.augmentation.recipe import read_view
from fedssl.errors import InputError
from fedssl.evaluation.evaluation_input import EvaluationInput
from fedssl.evaluation.features import extract
from fedssl.machine.devices import to_device
from fedssl.seeding import derive_seed, seed_torch, torch_generator
from fedssl.training import batches

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
MakeSchedule = Callable[[Optimizer], LRScheduler]
Transform = Callable[[Tensor], Tensor]
Place = tuple[int, *tuple[int | str, ...]]  # of a training in the run, see `fedssl.seeding`


def warmup_cosine(optimizer: Optimizer, *, epochs: int, warmup: int) -> LRScheduler:
    """Factors of the learning rates: 1/w, 2/w to 1 in the first w epochs, then half a cosine down to 0 after the last.

    Parameters
    ----------
    epochs : int
    warmup : int
        w, fewer than ``epochs``; 0 begins with the cosine.

    Raises
    ------
    InputError
        There are not so many epochs.
    """
    if not 0 <= warmup < epochs:
        raise InputError(f"warmup={warmup} must be at least 0 and fewer than the epochs={epochs} of training")

    def factor(epoch: int) -> float:
        if epoch < warmup:
            return (epoch + 1) / warmup
        return (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup))) / 2

    return LambdaLR(optimizer, factor)


def check_training(
    *,
    epochs: int,
    batch_size: int,
    optimizer: MakeOptimizer,
    groups: Sequence[Mapping[str, float]],
    lr_schedule: MakeSchedule | None,
    view: Mapping[str, Any],
    of: str,
) -> None:
    """Refuse settings of the training ``of`` a protocol that make no sense, before there is anything to train.

    ``groups`` are the settings of each group of parameters. Raises `InputError`.
    """
    for name, value, minimum in (("epochs", epochs, 0), ("batch_size", batch_size, 2)):
        if value < minimum:
            raise InputError(f"{name}={value} of {of} must be at least {minimum}")
    read_view(view, name="view")
    try:
        made = optimizer([{"params": [nn.Parameter(torch.zeros(1))], **group} for group in groups])
        if lr_schedule is not None:
            lr_schedule(made)
    except (TypeError, ValueError) as error:
        raise InputError(f"optimizer or lr_schedule of {of} refuses its settings: {error}; change them") from error


def classifier_of(encoder: nn.Module, subject: EvaluationInput) -> nn.Linear:
    """A `classifier` for what the encoder puts out."""
    few = subject.train.images[:2]
    found = extract(encoder, few, mean=subject.mean, std=subject.std, device=subject.device)
    return classifier(found.shape[1], subject)


def classifier(width: int, subject: EvaluationInput) -> nn.Linear:
    """A linear classifier of zeros for features of this length, on the subject's device."""
    head = nn.Linear(width, subject.num_classes).to(subject.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class Views:
    """What training sees of images: augmented, standardised, on the subject's device.

    Parameters
    ----------
    subject : EvaluationInput
    transform : callable or None
        Changes one uint8 image ``(channels, height, width)`` before the view is made, e.g. by torchvision's
        ``RandAugment``; what it draws is torch's own chance. None: nothing.
    view : mapping
        Fields of `fedssl.augmentation.recipe.View`; none of them leave images as they are.
    place : tuple
        Where in the run this is.
    """

    def __init__(
        self, subject: EvaluationInput, *, transform: Transform | None, view: Mapping[str, Any], place: Place
    ) -> None:
        size = subject.train.images.shape[-1]
        self._augment = Augmentation(size=size, mean=subject.mean, std=subject.std, views=[dict(view), {}])
        self._transform, self._device = transform, subject.device
        self.generator = torch_generator(*place)
        for device in {torch.device("cpu"), subject.device}:  # of transforms, and of layers such as dropout
            seed_torch(derive_seed(*place), device)

    def __call__(self, images: Tensor) -> Tensor:
        """A view of each of these images, uint8 ``(batch, channels, height, width)`` on the CPU."""
        if self._transform is not None:
            images = torch.stack([self._transform(image) for image in images])
        view, _ = self._augment(to_device(images, self._device), self.generator)
        return view


def fit(
    logits: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    optimizer: Optimizer,
    lr_schedule: MakeSchedule | None,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Minimise the mean cross-entropy.

    Parameters
    ----------
    logits : callable
        Scores ``(batch, num_classes)`` of the training images at these places, int64 ``(batch,)`` on the CPU.
    labels : Tensor
        Of all training images, int64 ``(n,)``, on the CPU.
    optimizer : Optimizer
        Of what is trained.
    lr_schedule : callable or None
        Makes what sets the learning rates after every epoch; None: they stay.
    epochs, batch_size : int
    generator : torch.Generator
        On the CPU, of the batches.
    before_epoch : callable
        Called with the number of every epoch, from 0 on.
    """
    schedule = None if lr_schedule is None else lr_schedule(optimizer)
    for epoch in range(epochs):
        before_epoch(epoch)
        for rows in batches(torch.arange(len(labels)), batch_size, generator=generator):
            scores = logits(rows)
            loss = F.cross_entropy(scores, to_device(labels[rows], scores.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if schedule is not None:
            schedule.step()


def predict(network: nn.Module, subject: EvaluationInput) -> Tensor:
    """Classes of the test images, ``(n_test,)``, by a network of encoder and classifier in eval mode."""
    images = subject.test.images
    return classes_of(extract(network, images, mean=subject.mean, std=subject.std, device=subject.device))


def classes_of(scores: Tensor) -> Tensor:
    """Classes with the highest scores ``(n, num_classes)``; raises `InputError` if a score is not finite."""
    if not scores.isfinite().all():
        raise InputError(
            "a classifier's scores are NaN or infinite, so its training or that of the encoder has diverged; lower the "
            "learning rate of the protocol, or optimizer.lr"
        )
    return scores.argmax(dim=1)
