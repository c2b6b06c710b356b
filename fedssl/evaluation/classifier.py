"""Training of a linear classifier by an optimizer, shared by fine-tuning and the papers' linear probes.

The classifier is initialized with zeros. Batches are drawn again in every epoch and contain all images. The result is
the accuracy after the last epoch; test images have no influence on training.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fedssl.augmentation import Augmentation
from fedssl.augmentation.augmentation import check_color
from fedssl.augmentation.recipe import RGB, read_view
from fedssl.errors import InputError
from fedssl.evaluation.features import accuracy
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.sampling import stratified_sample
from fedssl.evaluation.scores import ACCURACY
from fedssl.machine.devices import to_device
from fedssl.seeding import derive_seed, numpy_generator, seed_generators, torch_generator
from fedssl.training import batches

CPU = torch.device("cpu")

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
MakeSchedule = Callable[[Optimizer], LRScheduler]
Transform = Callable[[Tensor], Tensor]
SeedPath = tuple[int, *tuple[int | str, ...]]  # of a training, see `fedssl.seeding`


def warmup_cosine(optimizer: Optimizer, *, epochs: int, warmup: int) -> LRScheduler:
    """Scale the learning rates by 1/w, 2/w, ..., 1 in the first w = ``warmup`` epochs, then by half a cosine to 0."""
    if not 0 <= warmup < epochs:
        raise InputError(f"warmup={warmup} must be at least 0 and fewer than the epochs={epochs} of training")

    def factor(epoch: int) -> float:
        if epoch < warmup:
            return (epoch + 1) / warmup
        return (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup))) / 2

    return LambdaLR(optimizer, factor)


@dataclass(kw_only=True, eq=False)
class ClassifierTraining(EvaluationProtocol):
    """Evaluation protocol that trains a classifier."""

    trains_network = True
    title: ClassVar[str]  # in error messages

    name: str
    shares: Sequence[float]
    epochs: int
    batch_size: int
    optimizer: MakeOptimizer  # of parameter groups
    lr_schedule: MakeSchedule | None  # steps after every epoch; None keeps the learning rates
    transform: Transform | None  # these two as in `AugmentedViews`
    view: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares = tuple(self.shares)
        if not self.shares:
            raise InputError(f"shares=[] of {self.title} must have at least one share of the labels, e.g. [0.1,1.0]")
        read_view(self.view, name="view")
        groups = [{"params": [nn.Parameter(torch.zeros(1))], **settings} for settings in self.group_settings]
        try:
            optimizer = self.optimizer(groups)
            if self.lr_schedule is not None:
                self.lr_schedule(optimizer)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"optimizer or lr_schedule of {self.title} rejects its settings: {error}; change them"
            ) from error

    def result_name(self, share: float) -> str:
        """Return the name of the result with a share of the labels."""
        return f"{self.name}_{100 * share:g}_percent"

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {self.result_name(share): ACCURACY for share in self.shares}

    @property
    def group_settings(self) -> Sequence[Mapping[str, float]]:
        """Settings of each parameter group beside those of the optimizer."""
        return [{}]

    def views(self, evaluation_input: EvaluationInput, seed_path: SeedPath) -> "AugmentedViews":
        return AugmentedViews(evaluation_input, transform=self.transform, view=self.view, seed_path=seed_path)

    @abstractmethod
    def train(self, evaluation_input: EvaluationInput, rows: Tensor, seed_path: SeedPath) -> Tensor:
        """Train a classifier on the training images at ``rows``, and predict the classes of the test images."""

    def accuracy(self, evaluation_input: EvaluationInput, share: float, seed_path: SeedPath) -> float:
        """Return the accuracy of a classifier that is trained on a share of the labels."""

        def predict(given: EvaluationInput) -> Tensor:
            rows = stratified_sample(given.train.labels, share=share, generator=numpy_generator(*seed_path))
            return self.train(given, rows, seed_path)

        predictions = evaluation_input.predict_once((self, *seed_path), predict)
        return accuracy(predictions, evaluation_input.test.labels)

    def fit(
        self,
        logits: Callable[[Tensor], Tensor],
        labels: Tensor,
        *,
        modules: Sequence[nn.Module],
        generator: torch.Generator,
        before_epoch: Callable[[int], None] = lambda epoch: None,
        indices_on: torch.device = CPU,
    ) -> None:
        """Minimize the mean cross-entropy.

        ``logits`` maps indices of training images, int64 ``(batch,)`` on the device ``indices_on``, to scores ``(batch,
        num_classes)``. ``labels`` are those of all training images, int64 ``(n,)``, on the CPU. Each of ``modules`` is
        a parameter group. The CPU ``generator`` draws the batches. ``before_epoch`` is called with the number of every
        epoch, from 0. Indices and labels are copied to the device once per epoch.
        """
        optimizer = self.optimizer(
            [
                {"params": list(module.parameters()), **settings}
                for module, settings in zip(modules, self.group_settings, strict=True)
            ]
        )
        schedule = None if self.lr_schedule is None else self.lr_schedule(optimizer)
        device = next(modules[0].parameters()).device
        for epoch in range(self.epochs):
            before_epoch(epoch)
            cut = list(batches(torch.arange(len(labels)), self.batch_size, generator=generator))
            sizes, order = [len(rows) for rows in cut], torch.cat(cut)
            classes = to_device(labels[order], device).split(sizes)
            for rows, expected in zip(to_device(order, indices_on).split(sizes), classes, strict=True):
                loss = F.cross_entropy(logits(rows), expected)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if schedule is not None:
                schedule.step()


class AugmentedViews:
    """Training views of images: augmented, standardized, on the device of the evaluation.

    ``transform`` is applied to each uint8 image ``(channels, height, width)`` before the view, e.g. torchvision's
    ``RandAugment``; it draws from torch's global generator. ``view`` has fields of
    `fedssl.augmentation.recipe.ViewOptions`; without fields images are not augmented.
    """

    def __init__(
        self,
        evaluation_input: EvaluationInput,
        *,
        transform: Transform | None,
        view: Mapping[str, Any],
        seed_path: SeedPath,
    ) -> None:
        size, mean, std = evaluation_input.train.images.shape[-1], evaluation_input.mean, evaluation_input.std
        used = [f"evaluation.view.{key}" for key in RGB if view.get(key)]
        check_color(used, channels=len(mean))
        if transform is not None and evaluation_input.train.images.dtype != torch.uint8:
            raise InputError("evaluation.transform needs images of 8 bits; set it to null, or dataset.dtype=uint8")
        self._augment = Augmentation(size=size, mean=mean, std=std, views=[dict(view)])
        self._transform, self._device = transform, evaluation_input.device
        self.generator = torch_generator(*seed_path)
        for device in {torch.device("cpu"), self._device}:  # for transforms, and layers such as dropout
            seed_generators(derive_seed(*seed_path), device)

    def __call__(self, images: Tensor) -> Tensor:
        """Return a view of each image, from ``(batch, channels, height, width)`` on the CPU."""
        if self._transform is not None:
            images = torch.stack([self._transform(image) for image in images])
        return self._augment(to_device(images, self._device), self.generator)[0].images


def make_classifier(encoder: nn.Module, evaluation_input: EvaluationInput) -> nn.Linear:
    """Return a linear classifier of zeros for the output of the encoder, on the device of the evaluation."""
    few = evaluation_input.train.images.subset(torch.arange(2))
    return zero_classifier(evaluation_input.extract(encoder, few).shape[1], evaluation_input)


def zero_classifier(in_features: int, evaluation_input: EvaluationInput) -> nn.Linear:
    """Return a linear classifier of zeros for features of this length, on the device of the evaluation."""
    classifier = nn.Linear(in_features, evaluation_input.num_classes).to(evaluation_input.device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


def predict(network: nn.Module, evaluation_input: EvaluationInput) -> Tensor:
    """Predict the classes of the test images ``(n_test,)`` by encoder and classifier in eval mode."""
    return predicted_classes(evaluation_input.extract(network, evaluation_input.test.images))


def predicted_classes(scores: Tensor) -> Tensor:
    """Return the classes with the highest scores ``(n, num_classes)``; `InputError` if a score is not finite."""
    if not scores.isfinite().all():
        raise InputError(
            "a classifier's scores are NaN or infinite, so its training or that of the encoder has diverged; lower the "
            "learning rate of the protocol, or optimizer.lr"
        )
    return scores.argmax(dim=1)
