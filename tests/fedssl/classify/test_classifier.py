"""The classifier and its folds."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedssl.classify.classifier import PENALTIES, best_penalty, fit, fit_path, folds


def blobs(per_class: list[int], *, dim: int = 4, distance: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(per_class)), per_class)
    means = distance * np.random.default_rng(99).normal(size=(len(per_class), dim))
    return (means[labels] + generator.normal(size=(len(labels), dim))).astype(np.float32), labels


@pytest.mark.parametrize("per_class", [[6, 5], [6, 5, 9]])
def test_probabilities_minimize_the_penalized_cross_entropy(per_class: list[int]) -> None:
    x, labels = blobs(per_class)
    l2, classes = 1e-2, len(per_class)
    (model,) = fit_path(x, labels, classes=["a", "b", "c"][:classes], penalties=[l2])
    centered = x.astype(np.float64) - x.astype(np.float64).mean(0)
    scaled = centered / np.sqrt((centered**2).sum(1).mean())

    def loss(values: np.ndarray) -> float:
        weight, bias = values[:-classes].reshape(4, classes), values[-classes:]
        if classes == 2:  # scikit-learn's binary form: one vector of weights, logits 0 and w x + b
            weight, bias = np.stack([0 * weight[:, 1], weight[:, 1]], axis=1), np.array([0, bias[1]])
        logits = scaled @ weight + bias
        entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), labels]
        return float(entropy.mean() + l2 / 2 * (weight**2).sum())

    best = minimize(loss, np.zeros(5 * classes), tol=1e-10).x
    weight, bias = best[:-classes].reshape(4, classes), best[-classes:]
    if classes == 2:
        weight, bias = np.stack([0 * weight[:, 1], weight[:, 1]], axis=1), np.array([0, bias[1]])
    expected = np.exp(scaled @ weight + bias)
    np.testing.assert_allclose(model.probabilities(x), expected / expected.sum(1, keepdims=True), atol=2e-3)


def test_classes_without_images_have_probability_zero() -> None:
    x, labels = blobs([5, 5, 5])
    (model,) = fit_path(x, np.array([0, 1, 3])[labels], classes=list("abcd"), penalties=[1e-3])
    probabilities = model.probabilities(x)
    assert (probabilities[:, 2] == 0).all()
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (probabilities.argmax(1) == np.array([0, 1, 3])[labels]).mean() > 0.8


def test_many_classes_in_many_dimensions_are_learned() -> None:
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), size=(1000, 256))  # small gradients
    (model,) = fit_path(signs, np.arange(1000), classes=list(map(str, range(1000))), penalties=[1e-3])
    assert (model.logits(signs).argmax(1) == np.arange(1000)).mean() > 0.99


def test_noisy_labels_need_a_stronger_penalty_than_clear_ones() -> None:
    x, labels = blobs([100, 100], dim=2, distance=2)
    groups = np.arange(200)
    assert best_penalty(x, labels, classes=["a", "b"], groups=groups, seed=0) < 1e-2
    wide, noisy = np.random.default_rng(1).normal(size=(60, 60)).astype(np.float32), np.arange(60) % 2
    assert best_penalty(wide, noisy, classes=["a", "b"], groups=groups[:60], seed=0) == PENALTIES[0]


def test_a_shift_and_scale_of_features_change_nothing() -> None:
    x, labels = blobs([8, 8, 8])
    classes, groups, shifted = list("abc"), np.arange(24), 100 * x + 7
    penalties = [best_penalty(each, labels, classes=classes, groups=groups, seed=0) for each in (x, shifted)]
    assert penalties[0] == penalties[1]
    models = [fit(each, labels, classes=classes, l2=penalties[0]) for each in (x, shifted)]
    np.testing.assert_allclose(models[0].probabilities(x), models[1].probabilities(100 * x + 7), atol=1e-3)


def test_folds_predict_each_image_once_with_balanced_classes() -> None:
    labels = np.repeat([0, 1, 2], [5, 10, 3])
    parts = folds(labels, np.arange(18), seed=0)
    assert sorted(np.concatenate([test for _, test in parts])) == list(range(18))
    for train, test in parts:
        assert sorted([*train, *test]) == list(range(18))
        assert np.bincount(labels[test], minlength=3).tolist() in ([1, 2, 0], [1, 2, 1])


def test_a_group_is_never_on_both_sides() -> None:
    generator = np.random.default_rng(0)
    labels, groups = generator.integers(0, 4, 200), generator.integers(0, 25, 200)
    labels[0] = 4  # the only image of its class, which cannot be predicted while others of its group are
    parts = folds(labels, groups, seed=0)
    assert len(parts) == 5
    for train, test in parts:
        assert not np.intersect1d(groups[train], groups[test]).size
        assert np.isin(labels[test], labels[train]).all()


def test_single_images_are_for_training_only() -> None:
    labels = np.array([0, 1, 1, 1, 2, 2, 2])
    parts = folds(labels, np.arange(7), seed=0)
    assert all(0 in train for train, _ in parts)
    assert sorted(np.concatenate([test for _, test in parts])) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("labels", "groups"), [([0, 1], [0, 1]), ([0, 0, 1, 1], [0, 0, 1, 1]), ([0, 1, 1], [0, 1, 1])])
def test_no_folds_without_two_groups_of_two_classes(labels: list[int], groups: list[int]) -> None:
    assert folds(np.array(labels), np.array(groups), seed=0) == []
