"""Nearest-mean classification of representations."""

import torch

from fedssl.evaluation.features import accuracy
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY


class NearestMean(EvaluationProtocol):
    """Accuracy of the class with the nearest mean, as ``nearest_mean``."""

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"nearest_mean": ACCURACY}

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, float]:
        features = evaluation_input.features
        classes = features.train_labels.unique()  # a number may lack images
        means = torch.stack([features.train[features.train_labels == label].mean(dim=0) for label in classes])
        nearest = torch.cdist(features.test, means).argmin(dim=1)
        return {"nearest_mean": accuracy(classes[nearest], features.test_labels)}
