"""Cross-validated results: they are not too good, and intervals cover what they state."""

import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import binomtest

from fedssl.classify.classifier import log_loss
from fedssl.classify.validation import calibration_error, fit_temperature, train, useful_temperatures, wilson_interval
from tests.cases import some
from tests.fedssl.classify.test_classifier import blobs


@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (41, 50), (1, 3)])
def test_interval_of_independent_images_is_wilsons(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    found = wilson_interval(np.arange(count) < right, np.arange(count))
    assert found == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_groups_that_are_alike_count_as_fewer_images() -> None:
    # Four groups of five equal images, of which three are right:
    # spread = 4 / 3 * sum (s_g - p n_g)^2 / n^2 = 4 / 3 * (3 * (5 / 4)^2 + (15 / 4)^2) / 400 = 0.0625
    # effect = 0.0625 / (3 / 16 / 20) = 6.667, so that 20 images count as 3; Student's t with 3 degrees of freedom.
    right, groups = np.repeat([1, 1, 1, 0], 5).astype(bool), np.repeat(np.arange(4), 5)
    z, n, p = 3.182446, 3.0, 0.75
    middle, half = p + z**2 / 2 / n, z * np.sqrt(p * (1 - p) / n + z**2 / 4 / n**2)
    expected = [(middle + sign * half) / (1 + z**2 / n) for sign in (-1, 1)]
    assert wilson_interval(right, groups) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("share", some([0.5, 0.8, 0.95], default=[0.5, 0.95]))
@pytest.mark.parametrize(("groups", "size"), [(20, 1), (50, 1), (15, 6)])
def test_interval_covers_the_share_in_95_of_100_draws(share: float, groups: int, size: int) -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        # Beta-binomial: the shares of groups vary, with an intraclass correlation of 1 / 5.
        shares = generator.beta(4 * share, 4 * (1 - share), groups) if size > 1 else np.full(groups, share)
        right = generator.random((groups, size)) < shares[:, None]
        low, high = wilson_interval(right.ravel(), np.repeat(np.arange(groups), size))
        covered += low <= share <= high
    assert 920 <= covered <= 995


def test_labels_without_relation_to_images_give_chance_accuracy() -> None:
    accuracies = []
    for seed in range(6):
        generator = np.random.default_rng(seed)
        x, labels = generator.normal(size=(40, 20)).astype(np.float32), np.repeat([0, 1], 20)
        _, validation = train(x, labels, classes=["a", "b"], groups=np.arange(40), seed=seed)
        accuracies.append(validation.accuracy)
    assert abs(np.mean(accuracies) - 0.5) < 0.09  # 240 images: a standard error of 0.032


def test_copies_in_one_group_do_not_improve_the_accuracy() -> None:
    generator = np.random.default_rng(0)
    x, labels = generator.normal(size=(30, 60)).astype(np.float32), np.arange(30) % 2
    x, labels, copies = np.repeat(x, 3, axis=0), np.repeat(labels, 3), np.repeat(np.arange(30), 3)
    results = [train(x, labels, classes=["a", "b"], groups=groups, seed=0)[1] for groups in (np.arange(90), copies)]
    assert results[0].accuracy > 0.9 > 0.65 > results[1].accuracy


def test_few_images_have_fewer_folds() -> None:
    x, labels = blobs([2, 2, 2], dim=4, distance=3, seed=0)
    _, validation = train(x, labels, classes=list("abc"), groups=np.arange(6), seed=0)
    assert validation.folds == 2


def test_accuracy_is_near_that_of_new_images() -> None:
    differences, covered = [], 0
    for seed in range(5):
        x, labels = blobs([10, 10, 10], dim=8, distance=0.7, seed=seed)
        new, new_labels = blobs([500, 500, 500], dim=8, distance=0.7, seed=1000 + seed)
        model, validation = train(x, labels, classes=list("abc"), groups=np.arange(30), seed=seed)
        true = float((model.logits(new).argmax(1) == new_labels).mean())
        differences.append(validation.accuracy - true)
        covered += validation.interval[0] <= true <= validation.interval[1]
    assert abs(np.mean(differences)) < 0.06
    assert covered >= 4


def test_recalls_and_confusion_count_the_held_out_images() -> None:
    x, labels = blobs([1, 6, 12], distance=0.5)
    _, validation = train(x, labels, classes=list("abc"), groups=np.arange(19), seed=0)
    assert validation.counts.tolist() == [0, 6, 12]
    assert np.isnan(validation.recalls[0])
    confusion = validation.confusion()
    assert confusion.sum(axis=1).tolist() == [0, 6, 12]
    np.testing.assert_allclose(validation.recalls[1:], confusion.diagonal()[1:] / [6, 12])
    assert validation.accuracy == pytest.approx(confusion.trace() / 18)
    assert validation.most_frequent == pytest.approx(12 / 18)


def test_temperature_restores_scaled_logits() -> None:
    generator = np.random.default_rng(0)
    logits = 2 * generator.normal(size=(4000, 5))
    probabilities = np.exp(log_softmax(logits, axis=1))
    labels = (probabilities.cumsum(axis=1) > generator.random((4000, 1))).argmax(axis=1)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)
    grid = np.exp(np.linspace(-0.5, 0.5, 201))
    losses = [np.log(t) ** 2 / 2 - log_softmax(logits / t, axis=1)[np.arange(4000), labels].sum() for t in grid]
    assert fit_temperature(logits, labels) == pytest.approx(grid[np.argmin(losses)], rel=0.01)


def test_a_temperature_must_lower_the_held_out_loss() -> None:
    generator = np.random.default_rng(0)
    logits = 2 * generator.normal(size=(600, 5))
    probabilities = np.exp(log_softmax(logits, axis=1))
    labels = (probabilities.cumsum(axis=1) > generator.random((600, 1))).argmax(axis=1)
    fold_of = np.arange(600) % 3
    temperature, of_folds = useful_temperatures(3 * logits, labels, fold_of)
    assert temperature == fit_temperature(3 * logits, labels)
    # Fold 0 has the temperature of the other two.
    assert of_folds[0] == fit_temperature(3 * logits[fold_of != 0], labels[fold_of != 0])
    # Two folds with opposite errors: what one learns makes the other worse.
    opposite = np.where((fold_of == 1)[:, None], 3, 1 / 3) * logits
    rows = fold_of > 0
    assert useful_temperatures(opposite[rows], labels[rows], fold_of[rows]) == (1, {1: 1, 2: 1})


def test_a_temperature_of_few_labels_does_not_harm_new_images() -> None:
    increases = []
    for seed in range(12):
        (x, labels), (new, new_labels) = (blobs([n] * 8, dim=16, seed=100 * n + seed) for n in (2, 50))
        model, _ = train(x, labels, classes=list("abcdefgh"), groups=np.arange(16), seed=seed)
        logits = model.logits(new)
        increases.append((log_loss(logits / model.temperature, new_labels) - log_loss(logits, new_labels)) / 400)
    assert np.mean(increases) < 0.01  # 0.15 by the logits of classifiers that each choose a penalty


def test_temperature_of_perfect_predictions_is_no_certainty() -> None:
    assert 0.1 < fit_temperature(np.array([[3.0, 0.0], [0.0, 3.0]]), np.array([0, 1])) < 1


def test_calibration_error_of_two_bins() -> None:
    # The ten least certain images: 0.6 on average, 5 right; the others: 0.9, 10 right: (1 + 1) / 20.
    confidences = np.repeat([0.6, 0.9], 10)
    right = np.array([1] * 5 + [0] * 5 + [1] * 10, dtype=bool)
    assert calibration_error(confidences, right) == pytest.approx(0.1)
    assert calibration_error(confidences[::-1], right[::-1]) == pytest.approx(0.1)
