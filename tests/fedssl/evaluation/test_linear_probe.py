"""The linear probe by hand and against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from fedssl.evaluation.linear_probe import linear_probe, softmax_regression, standardize
from tests.fedssl.evaluation.made import blobs


def test_softmax_regression_by_hand():
    # x = -1 (class 0) and x = 1 (class 1). By symmetry the weight is (-a, a) and the bias 0, and the loss is
    # log(1 + e^(-2a)) + l2 a^2, whose derivative is 0 where l2 a = 1 / (1 + e^(2a)): a = 1 for l2 = 1 / (1 + e^2).
    x, labels = torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1])
    weight, bias = softmax_regression(x, labels, num_classes=2, l2=1 / (1 + math.exp(2)))
    torch.testing.assert_close(weight, torch.tensor([[-1.0, 1.0]]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(bias, torch.zeros(2), rtol=0, atol=1e-3)


@pytest.mark.parametrize("n", [200, 8, 6], ids=["more images than features", "as many", "fewer"])
@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_softmax_regression_equals_scikit_learn(n: int, l2: float):
    data = blobs(n=n)
    x, x_test = standardize(data.train, data.test)
    weight, bias = softmax_regression(x, data.train_labels, num_classes=4, l2=l2)
    # scikit-learn minimizes C * sum of losses + ||weight||^2 / 2.
    reference = LogisticRegression(C=1 / (n * l2), tol=1e-10, max_iter=20_000)
    reference.fit(x.double().numpy(), data.train_labels.numpy())
    result = torch.addmm(bias, x_test, weight).softmax(1).double().numpy()
    np.testing.assert_allclose(result, reference.predict_proba(x_test.double().numpy()), atol=5e-3)


@pytest.mark.parametrize("n", [50, 140, 300])
def test_the_optimum_of_separable_classes_is_reached(n: int):
    digits = load_digits()
    x, _ = standardize(*[torch.from_numpy(digits.data[:n]).float()] * 2)
    labels = digits.target[:n]
    weight, bias = softmax_regression(x, torch.from_numpy(labels), num_classes=10, l2=1e-4)
    reference = LogisticRegression(C=1 / (n * 1e-4), tol=1e-10, max_iter=20_000).fit(x.double().numpy(), labels)

    def objective(w: np.ndarray, b: np.ndarray) -> float:
        logits = x.double().numpy() @ w + b
        losses = logsumexp(logits, axis=1) - logits[np.arange(n), labels]
        return losses.mean() + 1e-4 / 2 * np.square(w).sum()

    least = objective(reference.coef_.T, reference.intercept_)
    assert objective(weight.double().numpy(), bias.double().numpy()) == pytest.approx(least, rel=1e-4)


def test_linear_probe_equals_scikit_learn():
    data = blobs()
    scaler = StandardScaler().fit(data.train.double().numpy())
    reference = LogisticRegression(C=1 / (200 * 1e-2), tol=1e-10, max_iter=20_000)
    reference.fit(scaler.transform(data.train.double().numpy()), data.train_labels.numpy())
    result = linear_probe(data, l2=1e-2)
    expected = reference.predict(scaler.transform(data.test.double().numpy()))
    assert (result.numpy() == expected).mean() >= 0.99  # a test image on a boundary may fall to either side


def test_standardize_leaves_a_constant_feature_at_zero():
    train = torch.tensor([[0.1, 1.0], [0.1, 3.0], [0.1, 5.0]])
    x, x_test = standardize(train, torch.tensor([[0.4, 3.0]]))
    # Deviation of 1, 3, 5 with divisor n: sqrt(8 / 3).
    torch.testing.assert_close(x[:, 1], torch.tensor([-1.0, 0.0, 1.0]) * 2 / math.sqrt(8 / 3))
    torch.testing.assert_close(x[:, 0], torch.zeros(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(x_test, torch.tensor([[0.3, 0.0]]))
