"""Evaluation inputs for tests of protocols."""

import torch
from torch import Tensor

from fedssl.datasets.images import TensorImages
from fedssl.evaluation.features import Features
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol, LabeledImages, evaluate
from fedssl.evaluation.scores import to_flat_dict


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
