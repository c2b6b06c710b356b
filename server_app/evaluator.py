"""Evaluation on the server: the frozen global encoder under the protocols that the settings name."""

from collections.abc import Mapping

import torch
from omegaconf import DictConfig
from torch import nn

from fedssl.config import make
from fedssl.datasets.base import load
from fedssl.evaluation.features import Features, extract, pixels


class Evaluator:
    """Labelled pictures of the data set and the protocols of ``evaluation`` and ``final_evaluation``.

    Without labelled training and test pictures there is nothing to evaluate with: all results are empty.
    """

    def __init__(self, settings: DictConfig, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.protocol = make(settings.evaluation)
        self.final_protocol = make(settings.final_evaluation)

    def check(self) -> None:
        """Find before any training a protocol that the labels do not allow: run all on features that say nothing."""
        train, test = load(self.settings.dataset, "train"), load(self.settings.dataset, "test")
        if train is not None and test is not None:
            classes = int(train.labels.max()) + 1
            nothing = torch.zeros(len(train.labels), 1)
            features = Features(nothing, train.labels, nothing[:1], test.labels[:1], num_classes=classes)
            for protocol in (self.protocol, self.final_protocol):
                protocol(features, seed=self.settings.seed)

    def due(self, round: int) -> bool:
        """Whether the encoder is evaluated after this round."""
        every = self.settings.evaluate_every
        return every > 0 and (round % every == 0 or round == self.settings.rounds)

    def evaluate(self, encoder: nn.Module) -> dict[str, float]:
        """Results of the protocol for the rounds."""
        features = self._features(encoder)
        return self.protocol(features, seed=self.settings.seed) if features else {}

    def compare(self, encoders: Mapping[str, nn.Module]) -> dict[str, dict[str, float]]:
        """Results of the final protocols for each named encoder and for raw pixels, on the same draws."""
        features = {name: self._features(encoder) for name, encoder in encoders.items()}
        features["pixels"] = self._features(None)
        return {
            name: self.final_protocol(data, seed=self.settings.seed)
            for name, data in features.items()
            if data is not None
        }

    def _features(self, encoder: nn.Module | None) -> Features | None:
        train, test = load(self.settings.dataset, "train"), load(self.settings.dataset, "test")
        if train is None or test is None:
            return None
        mean, std = self.settings.dataset.mean, self.settings.dataset.std
        maps = [
            pixels(split.images)
            if encoder is None
            else extract(encoder, split.images, mean=mean, std=std, device=self.device)
            for split in (train, test)
        ]
        return Features(maps[0], train.labels, maps[1], test.labels, num_classes=int(train.labels.max()) + 1)
