"""The ridge probe by hand, against slow transcriptions, and with targets that teach nothing."""

import logging

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from fedssl.errors import InputError
from fedssl.evaluation import regression
from fedssl.evaluation.features import Features
from fedssl.evaluation.linear_probe import standardize
from fedssl.evaluation.regression import Regression, ridge_predictions
from fedssl.evaluation.scores import ERROR, num_test_images, units_of
from tests.fedssl.evaluation.made import blobs, of_targets

NAN = float("nan")


def test_ridge_by_hand():
    # x = -1, 1 is standardized already, and y = 3, 5 becomes -1, 1: the mean of (y - w x)^2 + l2 w^2 is smallest where
    # w - 1 + l2 w = 0, w = 1 / (1 + l2) = 1/2 for l2 = 1. The prediction at x = 2 is 4 + 1/2 * 2 = 5.
    x, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([3.0, 5.0], dtype=torch.float64)
    assert ridge_predictions(x, y, torch.tensor([[2.0]]), l2=1.0) == pytest.approx([5.0])


@pytest.mark.parametrize("n", [200, 6], ids=["more images than features", "fewer"])
def test_ridge_equals_its_normal_equations_in_every_unit(n: int):
    data = blobs(n=n)
    y = (data.train[:, 0] - 2 * data.train_labels).double()
    y[1::5] = NAN
    known = ~y.isnan()
    x, x_test = standardize(data.train[known].double(), data.test.double())
    t = (y[known] - y[known].mean()) / y[known].std(correction=0)
    m = len(t)
    w = torch.linalg.solve(x.T @ x / m + 1e-2 * torch.eye(8, dtype=torch.float64), x.T @ t / m)  # x has mean 0
    expected = x_test @ w * y[known].std(correction=0) + y[known].mean()
    result = ridge_predictions(data.train, y, data.test, l2=1e-2)
    np.testing.assert_allclose(result, expected, rtol=1e-8)
    scaled = ridge_predictions(data.train, 1e6 * y - 5, data.test, l2=1e-2)
    np.testing.assert_allclose(scaled, 1e6 * result - 5, rtol=1e-8)


def test_results_equal_slow_formulas(monkeypatch: pytest.MonkeyPatch):
    data, generator = blobs(), torch.Generator().manual_seed(3)
    noise = torch.randn(2, 200, 2, generator=generator, dtype=torch.float64)
    train, test = (x[:, :2].double() + each for x, each in zip((data.train, data.test), noise, strict=True))
    test[::9, 1] = NAN
    scores, _ = of_targets(monkeypatch, Regression(l2=1e-2), regression, data, train, test)
    expected: dict[str, dict[str, float]] = {name: {} for name in Regression().result_units(0)}
    for number, name in enumerate("ab"):
        predicted = ridge_predictions(data.train, train[:, number], data.test, l2=1e-2)
        pairs = [(y, p) for y, p in zip(test[:, number].tolist(), predicted, strict=True) if y == y]
        mean = sum(y for y, _ in pairs) / len(pairs)
        squares = sum((y - p) ** 2 for y, p in pairs) / sum((y - mean) ** 2 for y, _ in pairs)
        ranks = [rankdata(values) for values in zip(*pairs, strict=True)]
        values = 1 - squares, sum(abs(y - p) for y, p in pairs) / len(pairs), np.corrcoef(*ranks)[0, 1]
        for of_result, value in zip(expected.values(), values, strict=True):
            of_result[name] = value
    for name, parts in expected.items():
        assert scores[name].parts == pytest.approx(parts)
        assert scores[name].value == pytest.approx(sum(parts.values()) / 2)
    assert 0.3 < scores["regression_r2"].value < 0.99
    assert units_of(scores) == Regression().result_units(0)
    assert scores["regression_mae"].unit == ERROR


def test_a_collapsed_encoder_predicts_the_mean(monkeypatch: pytest.MonkeyPatch):
    data = blobs()
    collapsed = Features(torch.ones(200, 8), data.train_labels, torch.ones(200, 8), data.test_labels, num_classes=4)
    y = torch.arange(200, dtype=torch.float64)[:, None]
    scores, _ = of_targets(monkeypatch, Regression(l2=1e-2), regression, collapsed, y, y)
    # The mean absolute deviation of 0 ... 199 from 99.5 is 50.
    assert {name: score.value for name, score in scores.items()} == pytest.approx(
        {"regression_r2": 0, "regression_mae": 50, "regression_spearman": 0}
    )


def test_constant_targets_have_no_result(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    data = blobs()
    train, test = (
        torch.stack([x[:, 0], x[:, 0] * 0 + 3, x[:, 0] * NAN], dim=1).double() for x in (data.train, data.test)
    )
    scores, subject = of_targets(monkeypatch, Regression(l2=1e-2), regression, data, train, test)
    assert all(score.parts == {} for score in scores.values())  # one target is left
    with caplog.at_level(logging.WARNING):
        Regression().validate(subject, feature_dim=8)
    reason = "because the known values in training or test images are all equal (b, c)"
    assert caplog.messages == [f"2 of 3 targets have no result, {reason}"]
    _, subject = of_targets(monkeypatch, Regression(l2=1e-2), regression, data, train[:, 1:], test[:, 1:])
    with pytest.raises(InputError, match="no target can be evaluated"):
        Regression().validate(subject, feature_dim=8)


def test_images_without_a_known_target_are_not_counted(monkeypatch: pytest.MonkeyPatch):
    """Set the target a of the test images 0 to 3 of eight, b of 2 to 5, and a constant c of all."""
    data = blobs(n=8)
    y = torch.arange(8, dtype=torch.float64)
    train = torch.stack([y, -y, y], dim=1)
    test = torch.stack([y.where(y < 4, NAN), y.where((y >= 2) & (y < 6), NAN), torch.ones(8).double()], dim=1)
    scores, _ = of_targets(monkeypatch, Regression(), regression, data, train, test)
    assert num_test_images([scores]) == dict.fromkeys(Regression().result_units(0), 6)
    scores, _ = of_targets(monkeypatch, Regression(), regression, data, train[:, :1], test[:, :1])
    assert num_test_images([scores]) == dict.fromkeys(Regression().result_units(0), 4)
