"""The kNN protocol against a slow transcription and by hand."""

import math

import numpy as np
import pytest
import torch

from fedssl.evaluation import knn
from fedssl.evaluation.features import Features
from fedssl.evaluation.knn import knn_predict
from tests.fedssl.evaluation.made import blobs


def slow_knn(data: Features, *, k: int, temperature: float) -> list[int]:
    """Wu et al. 2018, section 3.4, one test image and one neighbor at a time in float64."""
    train, test = data.train.double().numpy(), data.test.double().numpy()
    predictions = []
    for query in test:
        cosines = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in train]
        votes = [0.0] * data.num_classes
        for index in sorted(range(len(train)), key=lambda i: -cosines[i])[:k]:
            votes[int(data.train_labels[index])] += math.exp(cosines[index] / temperature)
        predictions.append(max(range(data.num_classes), key=votes.__getitem__))
    return predictions


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (20, 1.0), (1000, 0.1)])
def test_knn_equals_the_slow_loop(k: int, temperature: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(knn, "_SIMILARITIES", 200 * 30)  # several blocks, the last one smaller
    data = blobs()
    result = knn_predict(data, k=k, temperature=temperature)
    assert result.tolist() == slow_knn(data, k=k, temperature=temperature)


def test_knn_by_hand():
    # Cosines with the query (1, 0): 1 (class 0), 0.8 and 0.8 (class 1), 0 (class 0).
    train = torch.tensor([[2.0, 0.0], [0.8, 0.6], [4.0, -3.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1, 0])
    query = torch.tensor([[5.0, 0.0]])

    def predict(k: int, temperature: float) -> int:
        features = Features(train, labels, query, torch.tensor([0]), num_classes=2)
        return knn_predict(features, k=k, temperature=temperature).item()

    assert predict(1, 0.1) == 0
    # k = 3, temperature 0.1: class 0 e^10 = 22026, class 1 2 e^8 = 5962.
    assert predict(3, 0.1) == 0
    # Temperature 1: class 0 e = 2.72, class 1 2 e^0.8 = 4.45; with the fourth, class 0 e + 1 = 3.72.
    assert predict(3, 1.0) == 1
    assert predict(4, 1.0) == 1
    # Temperature 10: class 0 e^0.1 + 1 = 2.105, class 1 2 e^0.08 = 2.167.
    assert predict(200, 10.0) == 1
