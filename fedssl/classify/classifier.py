"""Multinomial logistic regression on the features of an encoder, by scikit-learn.

Features are centered and divided by one number, as in `fedssl.evaluation.few_labels`, whose penalty ``l2`` is one of
those that the inner cross-validation compares. The module needs no torch, so that devices without it can classify.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # on weights for features of mean squared length 1; descending
DEFAULT_PENALTY = 1e-3  # if there are too few images to choose
FOLDS, INNER_FOLDS = 5, 3
MANY_CLASSES = 100  # above, the cost grows with the square of their number
_MAX_ITERATIONS = 500
# Gradient at which a fit ends: scikit-learn's, but at most a share of the first one. That is the mean feature of a
# class times its share of the images; for 1,000 classes it is so small that scikit-learn would not take a step.
_TOLERANCE, _OF_FIRST_GRADIENT = 1e-4, 0.03

Fold = tuple[np.ndarray, np.ndarray]  # rows for training and rows to predict


@dataclass(frozen=True, eq=False)
class Classifier:
    """A linear classifier, whose probabilities are softmax(((h - center) weight + bias) / temperature)."""

    classes: tuple[str, ...]
    center: np.ndarray  # float64, ``(dim,)``
    weight: np.ndarray  # float64, ``(dim, classes)``
    bias: np.ndarray  # float64, ``(classes,)``; -inf for classes without images
    temperature: float = 1.0

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Return the logits of features ``(n, dim)`` before the temperature, float64 ``(n, classes)``."""
        logits: np.ndarray = (features - self.center) @ self.weight + self.bias
        return logits

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return the calibrated probabilities of features ``(n, dim)``, float64 ``(n, classes)``."""
        probabilities: np.ndarray = softmax(self.logits(features) / self.temperature, axis=1)
        return probabilities


def fit_path(
    features: np.ndarray, labels: np.ndarray, *, classes: Sequence[str], penalties: Sequence[float] = PENALTIES
) -> Iterator[Classifier]:
    """Yield the classifier of each penalty, descending; each fit starts from the one before.

    The mean cross-entropy plus l2 / 2 * ||weight||^2 is minimized. ``labels`` are int64 ``(n,)``, of several classes.
    """
    center = features.mean(axis=0, dtype=np.float64)
    x = features - center
    scale = np.sqrt(np.square(x).sum(axis=1).mean()) or 1.0
    sums = np.zeros((len(classes), x.shape[1]))
    np.add.at(sums, labels, x / scale)
    tolerance = min(_TOLERANCE, _OF_FIRST_GRADIENT * float(np.abs(sums).max()) / len(labels))
    model = LogisticRegression(max_iter=_MAX_ITERATIONS, warm_start=True, tol=tolerance)
    for l2 in penalties:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that many classes may be numbers
            model.set_params(C=1 / (l2 * len(labels))).fit((x / scale).astype(np.float32), labels)
        weight, bias = np.zeros((x.shape[1], len(classes))), np.full(len(classes), -np.inf)
        columns = model.classes_[-len(model.coef_) :]  # of two classes, scikit-learn has the weights of the second
        bias[model.classes_] = 0
        weight[:, columns], bias[columns] = model.coef_.T / scale, model.intercept_
        yield Classifier(tuple(classes), center, weight, bias)


def fit(features: np.ndarray, labels: np.ndarray, *, classes: Sequence[str], l2: float) -> Classifier:
    """Fit a classifier with one penalty, see `fit_path`."""
    return next(fit_path(features, labels, classes=classes, penalties=[l2]))


def best_penalty(
    features: np.ndarray, labels: np.ndarray, *, classes: Sequence[str], groups: np.ndarray, seed: int
) -> float:
    """Return the penalty before the first one, descending, that does not lower the log loss of a cross-validation.

    With many classes, and so with many images, one fold and every second penalty are enough.
    """
    parts, penalties = folds(labels, groups, seed=seed, number=INNER_FOLDS), list(PENALTIES)
    if len(classes) > MANY_CLASSES:
        parts, penalties = parts[:1], penalties[::2]
    paths = [fit_path(features[train], labels[train], classes=classes, penalties=penalties) for train, _ in parts]
    best, lowest = DEFAULT_PENALTY, np.inf
    for l2, models in zip(penalties, zip(*paths, strict=True), strict=False):
        loss = 0.0
        for model, (_, test) in zip(models, parts, strict=True):
            loss += log_loss(model.logits(features[test]), labels[test])
        if loss >= lowest:
            break
        best, lowest = l2, loss
    return best


def log_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum of the log losses of logits ``(n, classes)``."""
    return -float(log_softmax(logits, axis=1)[np.arange(len(labels)), labels].sum())


def folds(labels: np.ndarray, groups: np.ndarray, *, seed: int, number: int = FOLDS) -> list[Fold]:
    """Split images into stratified folds, with no group on both sides; empty if that is impossible.

    An image is only predicted if its class has training images in other groups; otherwise it is for training, if its
    group is not predicted. ``labels`` and ``groups`` are int64 ``(n,)``; without groups each image is one.
    """
    of_class = np.unique(np.stack([labels, groups]), axis=1)[0]  # the class of each of its groups
    number = min(number, np.unique(of_class, return_counts=True)[1].max(initial=0))
    if number < 2:
        return []
    kind = StratifiedKFold if len(np.unique(groups)) == len(groups) else StratifiedGroupKFold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes with fewer images than folds, which are treated below
        parts = list(kind(number, shuffle=True, random_state=seed).split(labels, labels, groups))
    result = []
    for train, part in parts:
        test = part[np.isin(labels[part], labels[train])]
        train = np.flatnonzero(~np.isin(groups, groups[test]))
        if len(test) and len(np.unique(labels[train])) > 1:
            result.append((train, test))
    return result
