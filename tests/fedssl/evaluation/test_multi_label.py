"""The probe of several labels against scikit-learn, by hand, and with labels that teach nothing."""

import logging

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedssl.errors import InputError
from fedssl.evaluation import multi_label
from fedssl.evaluation.linear_probe import standardize
from fedssl.evaluation.multi_label import MultiLabel, label_scores
from fedssl.evaluation.scores import FRACTION, num_test_images
from tests.fedssl.evaluation.made import blobs, of_targets

NAN = float("nan")


def labels_of(classes: torch.Tensor) -> torch.Tensor:
    """Three labels of each class, with some unknown."""
    labels = torch.stack([classes < 2, classes == 1, classes % 2 == 0], dim=1).double()
    labels[::7, 1] = NAN
    return labels


def slow_average_precision(labels: list[float], scores: list[float]) -> float:
    """Precision at each threshold, weighted by the recall that it adds."""
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [label for label, score in zip(labels, scores, strict=True) if score >= threshold]
        recall = sum(chosen) / sum(labels)
        total += (recall - recall_before) * sum(chosen) / len(chosen)
        recall_before = recall
    return total


def test_scores_equal_scikit_learn_per_class():
    data = blobs()
    labels = labels_of(data.train_labels)
    x, x_test = standardize(data.train, data.test)
    result = label_scores(data.train, labels, data.test, l2=1e-2, max_iterations=300)
    for number in range(3):
        known = ~labels[:, number].isnan()
        reference = LogisticRegression(C=1 / (known.sum().item() * 1e-2), tol=1e-10, max_iter=20_000)
        reference.fit(x[known].double().numpy(), labels[known, number].numpy())
        expected = reference.decision_function(x_test.double().numpy())
        np.testing.assert_allclose(result[:, number], expected, rtol=5e-3, atol=5e-3)


def test_map_equals_the_slow_loop(monkeypatch: pytest.MonkeyPatch):
    data = blobs(spread=4.0)
    labels, test = labels_of(data.train_labels), labels_of(data.test_labels)
    scores, _ = of_targets(monkeypatch, MultiLabel(l2=1e-2), multi_label, data, labels, test)
    logits = label_scores(data.train, labels, data.test, l2=1e-2, max_iterations=300)
    expected = {}
    for number, name in enumerate("abc"):
        known = ~test[:, number].isnan()
        expected[name] = slow_average_precision(test[known, number].tolist(), logits[known, number].tolist())
    assert scores["multi_label_map"].parts == pytest.approx(expected)
    assert scores["multi_label_map"].value == pytest.approx(sum(expected.values()) / 3)
    assert 0.3 < scores["multi_label_map"].value < 0.95
    assert scores["multi_label_map"].unit == FRACTION


def test_classes_that_teach_or_test_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """b has no positive training image, c no positive test image, d no known one."""
    data = blobs()
    train, test = (torch.stack([y == 0, y == 9, y == 0, y == 0], dim=1).double() for y in [data.train_labels] * 2)
    test[:50, 1], test[:, 2], test[:, 3] = 1, 0, NAN
    scores, subject = of_targets(monkeypatch, MultiLabel(l2=1e-2), multi_label, data, train, test)
    # All test images have the same score of b, so that its average precision is its share, 50 of 200.
    assert set(scores["multi_label_map"].parts) == {"a", "b"}
    assert scores["multi_label_map"].parts["b"] == 1 / 4
    with caplog.at_level(logging.WARNING):
        MultiLabel().validate(subject, feature_dim=8)
    assert caplog.messages == [
        "1 of 4 classes cannot be learned, because their known training labels are all equal (b)",
        "2 of 4 classes are not part of multi_label_map, because their known test labels are all equal (c, d)",
    ]
    scores, subject = of_targets(monkeypatch, MultiLabel(l2=1e-2), multi_label, data, train, torch.zeros_like(test))
    assert scores == {}
    with pytest.raises(InputError, match=r"no class can be evaluated, because their known test labels are all equal"):
        MultiLabel().validate(subject, feature_dim=8)


def test_images_without_a_known_label_are_not_counted(monkeypatch: pytest.MonkeyPatch):
    """Set the target a of the test images 0 to 3 of eight, b of 2 to 5, and a constant c of all."""
    data, place = blobs(n=8), torch.arange(8)
    labels = (place % 2).double()
    known = [place < 4, (place >= 2) & (place < 6)]
    test = torch.stack([*(labels.where(each, NAN) for each in known), torch.zeros(8).double()], dim=1)
    train = torch.stack([labels] * 3, dim=1)
    scores, _ = of_targets(monkeypatch, MultiLabel(), multi_label, data, train, test)
    assert num_test_images([scores]) == {"multi_label_map": 6}
    scores, _ = of_targets(monkeypatch, MultiLabel(), multi_label, data, train[:, :1], test[:, :1])
    assert num_test_images([scores]) == {"multi_label_map": 4}
