"""What an evaluation protocol is given: an encoder, and labelled images to find out with what it is worth."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedssl.config.settings import DataSettings
from fedssl.datasets.base import Split, load, load_split, source_split
from fedssl.evaluation.features import Features, extract, pixels

# What is needed to evaluate, and how people are told of it.
SPLITS: dict[Split, str] = {"train": "training", "test": "test"}


@dataclass(frozen=True, eq=False)
class LabeledImages:
    """Images, each with a label.

    Attributes
    ----------
    images : Tensor
        uint8, ``(n, channels, height, width)``.
    labels : Tensor
        int64, ``(n,)``.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationInput:
    """An encoder and the images.

    Attributes
    ----------
    encoder : nn.Module or None
        Maps standardised images to representations; None: raw pixels are to be judged. It belongs to the run: a
        protocol that trains it takes a copy.
    train, test : LabeledImages
    mean, std : tuple of float
        Per channel, of pixels in [0, 1].
    device : torch.device
        Where the encoder runs.
    """

    encoder: nn.Module | None
    train: LabeledImages
    test: LabeledImages
    mean: tuple[float, ...]
    std: tuple[float, ...]
    device: torch.device

    @property
    def num_classes(self) -> int:
        """One more than the highest label for training."""
        return int(self.train.labels.max()) + 1

    @cached_property
    def features(self) -> Features:
        """What the frozen encoder makes of all images, computed once for all protocols that ask for it."""
        train, test = self._represent(self.train.images), self._represent(self.test.images)
        return Features(train, self.train.labels, test, self.test.labels, num_classes=self.num_classes)

    def predict_once(self, key: Hashable, predict: Callable[["EvaluationInput"], Tensor]) -> Tensor:
        """Return the predicted classes of the test images. Call ``predict`` once per key, for all test images.

        Protocols that train a network use this, so that subsets of the test images share one training. The key must
        identify the protocol and its training.
        """
        if key not in self._predictions:
            self._predictions[key] = predict(self)
        return self._predictions[key]

    @cached_property
    def _predictions(self) -> dict[Hashable, Tensor]:
        return {}

    def _represent(self, images: Tensor) -> Tensor:
        if self.encoder is None:
            return pixels(images)
        return extract(self.encoder, images, mean=self.mean, std=self.std, device=self.device)


def make_evaluation_input(
    encoder: nn.Module | None, data: DataSettings, *, device: torch.device
) -> EvaluationInput | None:
    """Join the encoder and the images of the data set; None without labelled images for both training and test."""
    train, test = load_labeled(data, "train"), load_labeled(data, "test")
    if train is None or test is None:
        return None
    return EvaluationInput(encoder=encoder, train=train, test=test, mean=data.mean, std=data.std, device=device)


def why_not_evaluable(data: DataSettings) -> str | None:
    """Why there is nothing to evaluate with, and how to get it, in one sentence; None: there is."""
    keys = data.reader.values
    for split, name in SPLITS.items():
        if load_labeled(data, split) is not None:
            continue
        names = f"dataset.splits.{split}={source_split(data, split) or 'null'}"
        advice = [f"give dataset.splits.{split}=NAME of a split that has them"]
        if load_split(data, split) is None:
            found = "names no images"
            if split == "test" and "test_fraction" in keys:
                advice.append("hold out a share of the training images with dataset.test_fraction=0.2")
        else:
            found = "names images without labels"
            advice += ["name the column of the labels with dataset.label=COLUMN"] if "label" in keys else []
            advice += ["give every class a subfolder"] if "folders" in keys else []
        return f"the data set has no labelled {name} images ({names} {found}); {', or '.join(advice)}"
    return None


def load_labeled(data: DataSettings, split: Split) -> LabeledImages | None:
    """Load a split of the data set; None if it has none or no labels for it."""
    image_data = load(data, split)
    if image_data is None or image_data.labels is None:
        return None
    return LabeledImages(image_data.images, image_data.labels)
