"""Evaluation inputs for tests of protocols."""

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fedssl.datasets.images import TensorImages
from fedssl.evaluation.features import Features
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol, evaluate
from fedssl.evaluation.scores import Score, to_flat_dict
from fedssl.evaluation.targets import Targets


def blobs(seed: int = 0, *, n: int = 200, dim: int = 8, classes: int = 4, spread: float = 2.0) -> Features:
    """Overlapping Gaussian classes with strongly correlated features."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, dim, generator=generator)
    mixing = torch.randn(dim, dim, generator=generator) * torch.logspace(0, -2, dim)

    def sample(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % classes
        noise = torch.randn(count, dim, generator=generator)
        return (centers[labels] + spread * noise) @ mixing + 3, labels

    return Features(*sample(n), *sample(n), num_classes=classes)


class Given(EvaluationInput):
    """An evaluation input with given features."""

    def __init__(self, data: Features) -> None:
        test = torch.zeros(len(data.test), 1, 2, 2, dtype=torch.uint8)
        train = torch.zeros(len(data.train), 1, 2, 2, dtype=torch.uint8)
        super().__init__(
            encoder=None,
            train=LabeledImages(TensorImages(train), data.train_labels),
            test=LabeledImages(TensorImages(test), data.test_labels),
            mean=(0.5,),
            std=(0.5,),
            device=torch.device("cpu"),
        )
        self.__dict__["features"] = data


def results(protocol: EvaluationProtocol, data: Features, *, seed: int) -> dict[str, float]:
    """Results as stored in files."""
    return to_flat_dict(evaluate(protocol, Given(data), seed=seed))


def of_targets(
    monkeypatch: pytest.MonkeyPatch,
    protocol: EvaluationProtocol,
    module: ModuleType,
    data: Features,
    train: Tensor,
    test: Tensor,
) -> tuple[dict[str, Score], EvaluationInput]:
    """Scores by a protocol of a module, and the input of an evaluation with given targets, which are named a, b, ..."""
    names = tuple("abcdef"[: train.shape[1]])
    monkeypatch.setattr(module, "read_targets", lambda *args, **settings: Targets(train, test, names))
    subject = Given(data)
    return evaluate(protocol, subject, seed=0), subject


def halves(encoder: nn.Module | None, *counts: int) -> EvaluationInput:
    """Images with bright upper halves (class 1) or lower ones; ``counts`` of training and test, or of both at once."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> LabeledImages:
        labels = torch.arange(count) % 2
        images = torch.randint(0, 100, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
        images[labels == 1, :, :2] += 120
        images[labels == 0, :, 2:] += 120
        return LabeledImages(TensorImages(images), labels)

    parts = [some(count) for count in counts]
    device = torch.device("cpu")
    return EvaluationInput(encoder=encoder, train=parts[0], test=parts[-1], mean=(0.5,), std=(0.5,), device=device)
