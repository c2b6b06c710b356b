"""Evaluation on the server: frozen encoders under the protocols that the settings name."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev

import torch
from torch import nn

from fedssl.datasets.base import load
from fedssl.evaluation.features import Features, accuracy, extract, pixels
from fedssl.evaluation.probes import Evaluation
from fedssl.methods.base import SSLMethod
from fedssl.methods.supervised import Supervised
from fedssl.report.runs import SPREAD
from fedssl.settings import DataSettings, EvaluationSettings


class Evaluator:
    """Labelled pictures of the data set and the protocols of ``evaluation`` and ``final_evaluation``.

    Without labelled training and test pictures there is nothing to evaluate with: all results are empty.
    """

    def __init__(
        self, settings: EvaluationSettings, *, data: DataSettings, rounds: int, device: torch.device, seed: int
    ) -> None:
        self._data, self._device, self._seed = data, device, seed
        self._every, self._rounds = settings.every, rounds
        self._protocol: Evaluation = settings.protocol.make()
        self._final_protocol: Evaluation = settings.final_protocol.make()

    def check(self) -> None:
        """Find before any training a protocol that the labels do not allow: run all on features that say nothing."""
        train, test = load(self._data, "train"), load(self._data, "test")
        if train is not None and test is not None:
            classes = int(train.labels.max()) + 1
            nothing = torch.zeros(len(train.labels), 1)
            features = Features(nothing, train.labels, nothing[:1], test.labels[:1], num_classes=classes)
            for protocol in (self._protocol, self._final_protocol):
                protocol(features, seed=self._seed)

    def due(self, round: int) -> bool:
        """Whether the encoder is evaluated after this round."""
        return self._every > 0 and (round % self._every == 0 or round == self._rounds)

    def evaluate(self, models: Iterable[SSLMethod]) -> dict[str, float]:
        """Results of the protocol for the rounds, over the models (see `over_models`), which are used in turn."""
        return over_models([self._results(self._protocol, model) for model in models])

    def compare(self, columns: Mapping[str, Iterable[SSLMethod]]) -> dict[str, dict[str, float]]:
        """Results of the final protocols for each named group of models and for raw pixels, on the same draws."""
        results = {
            name: over_models([self._results(self._final_protocol, model) for model in models])
            for name, models in columns.items()
        }
        raw = self._features(None)
        return {} if raw is None else {**results, "pixels": self._final_protocol(raw, seed=self._seed)}

    def _results(self, protocol: Evaluation, method: SSLMethod) -> dict[str, float]:
        """What the protocol says of the encoder, and the accuracy of a classifier of the method's own."""
        features = self._features(method.encoder)
        if features is None:
            return {}
        results = protocol(features, seed=self._seed)
        if isinstance(method, Supervised):
            with torch.inference_mode():
                logits = method.classifier(features.test.to(self._device))
            results["classifier"] = accuracy(logits.argmax(dim=1), features.test_labels)
        return results

    def _features(self, encoder: nn.Module | None) -> Features | None:
        train, test = load(self._data, "train"), load(self._data, "test")
        if train is None or test is None:
            return None
        maps = [
            pixels(split.images)
            if encoder is None
            else extract(encoder, split.images, mean=self._data.mean, std=self._data.std, device=self._device)
            for split in (train, test)
        ]
        return Features(maps[0], train.labels, maps[1], test.labels, num_classes=int(train.labels.max()) + 1)


def over_models(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The results of one model as they are; of several the mean and, under ``_std``, the standard deviation."""
    if len(results) == 1:
        return dict(results[0])
    averaged: dict[str, float] = {}
    for name in results[0]:
        if not name.endswith(SPREAD):
            values = [result[name] for result in results]
            averaged |= {name: mean(values), name + SPREAD: stdev(values)}
    return averaged
