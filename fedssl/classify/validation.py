"""Nested cross-validation of a classifier: accuracy with an interval, recalls, confusion and calibration.

The penalty is chosen within the training images of each fold, so that the accuracy is not too good. The temperature of
Guo et al. (2017) is learned on logits of held-out images, by classifiers with the penalty of the final one: those of
another penalty are more or less certain. It is used if it lowers the log loss in a further cross-validation over the
same folds, else it is 1: with few labels it often makes probabilities worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from scipy.stats import norm, t

from fedssl.classify.classifier import Classifier, best_penalty, fit, folds, log_loss
from fedssl.seeding import numpy_generator

LEVEL = 0.95
_BINS = 10
_PER_BIN = 10  # images per bin, if there are enough for two
_LOG_TEMPERATURES = (-4.0, 4.0)
_DRAWS = 200  # of labels, for the calibration error of a calibrated classifier


@dataclass(frozen=True, eq=False)
class Validation:
    """Results of images that were held out."""

    folds: int  # parts of the images that were held out in turn
    rows: np.ndarray  # of the images that were predicted, ``(m,)``
    labels: np.ndarray  # their classes, int64
    predictions: np.ndarray  # int64
    accuracy: float
    interval: tuple[float, float]  # of `LEVEL`, by `wilson_interval`
    most_frequent: float  # accuracy of predicting the most frequent class
    recalls: np.ndarray  # per class; NaN for those without a predicted image
    counts: np.ndarray  # predicted images per class
    error: float  # expected calibration error, of classifiers with the final penalty, without a temperature
    calibrated_error: float  # with a temperature learned on the other folds, if it is useful on these
    unavoidable_error: float  # mean of a calibrated classifier with these probabilities and as many images

    def confusion(self) -> np.ndarray:
        """Return the numbers of images by class (rows) and predicted class (columns)."""
        counts = np.zeros((len(self.counts), len(self.counts)), dtype=np.int64)
        np.add.at(counts, (self.labels, self.predictions), 1)
        return counts


def train(
    features: np.ndarray, labels: np.ndarray, *, classes: Sequence[str], groups: np.ndarray, seed: int
) -> tuple[Classifier, Validation | None]:
    """Train a calibrated classifier on all images; None if a cross-validation is impossible."""
    penalty = best_penalty(features, labels, classes=classes, groups=groups, seed=seed)
    model = fit(features, labels, classes=classes, l2=penalty)
    parts = folds(labels, groups, seed=seed)
    if not parts:
        return model, None
    logits = np.full((len(labels), len(classes)), np.nan)
    predictions, fold_of = np.full((2, len(labels)), -1)
    for number, (rows, test) in enumerate(parts):
        x, of_rows = features[rows], labels[rows]
        chosen = best_penalty(x, of_rows, classes=classes, groups=groups[rows], seed=seed)
        alike = fit(x, of_rows, classes=classes, l2=penalty)
        nested = alike if chosen == penalty else fit(x, of_rows, classes=classes, l2=chosen)
        predictions[test] = nested.logits(features[test]).argmax(axis=1)
        logits[test], fold_of[test] = alike.logits(features[test]), number
    held_out = np.flatnonzero(fold_of >= 0)
    logits, labels, fold_of = logits[held_out], labels[held_out], fold_of[held_out]
    temperature, of_folds = useful_temperatures(logits, labels, fold_of)
    divisors = np.array([of_folds[fold] for fold in fold_of.tolist()])
    validation = _validate(
        logits, labels, groups[held_out], predictions[held_out], divisors, rows=held_out, folds=len(parts)
    )
    return replace(model, temperature=temperature), validation


def _validate(
    logits: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    predictions: np.ndarray,
    temperatures: np.ndarray,
    *,
    rows: np.ndarray,
    folds: int,
) -> Validation:
    right, is_best = predictions == labels, logits.argmax(axis=1) == labels
    confidences = softmax(logits / temperatures[:, None], axis=1).max(axis=1)
    counts = np.bincount(labels, minlength=logits.shape[1])
    with np.errstate(invalid="ignore"):
        recalls = np.bincount(labels, weights=right, minlength=logits.shape[1]) / counts
    draws = numpy_generator(0, "calibration").random((_DRAWS, len(labels))) < confidences
    return Validation(
        folds=folds,
        rows=rows,
        labels=labels,
        predictions=predictions,
        accuracy=float(right.mean()),
        interval=wilson_interval(right, groups),
        most_frequent=float(counts.max() / len(labels)),
        recalls=recalls,
        counts=counts,
        error=calibration_error(softmax(logits, axis=1).max(axis=1), is_best),
        calibrated_error=calibration_error(confidences, is_best),
        unavoidable_error=float(np.mean([calibration_error(confidences, draw) for draw in draws])),
    )


def wilson_interval(right: np.ndarray, groups: np.ndarray, *, level: float = LEVEL) -> tuple[float, float]:
    r"""Return Wilson's interval of a share, for images that are independent only between groups.

    The number of images is divided by the design effect, at least 1: the variance of the share over groups (Cochran
    1977, Eq. 11.30) divided by that of independent images; quantiles are then Student's (Korn and Graubard
    1998, with Wilson's formula). If all images are right, or none is, each group counts as one image.
    """
    share, number = float(np.mean(right)), float(len(right))
    _, codes = np.unique(groups, return_inverse=True)
    sums, sizes = np.bincount(codes, weights=right), np.bincount(codes)
    z, count = float(norm.ppf((1 + level) / 2)), len(sizes)
    if count < len(right):
        z = float(t.ppf((1 + level) / 2, max(count - 1, 1)))
        spread = count / max(count - 1, 1) * np.square(sums - share * sizes).sum() / number**2
        effect = spread / (share * (1 - share) / number) if 0 < share < 1 else number / count
        number /= max(effect, 1.0)
    middle = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    half = z / (1 + z**2 / number) * np.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    return max(0.0, middle - float(half)), min(1.0, middle + float(half))


def useful_temperatures(logits: np.ndarray, labels: np.ndarray, fold_of: np.ndarray) -> tuple[float, dict[int, float]]:
    """Return the temperature for new images, and for each fold that of the other folds, from held-out logits.

    Each is 1 unless it lowers the log loss in a cross-validation over the folds from which it is learned.
    """
    parts = {int(fold): np.flatnonzero(fold_of == fold) for fold in np.unique(fold_of)}

    @cache
    def without(folds: frozenset[int]) -> float:
        rows = ~np.isin(fold_of, list(folds))
        return fit_temperature(logits[rows], labels[rows])

    def useful(left_out: frozenset[int]) -> float:
        folds = [fold for fold in parts if fold not in left_out]
        if len(folds) < 2:
            return 1.0
        gain = 0.0
        for fold in folds:
            of_fold, temperature = logits[parts[fold]], without(left_out | {fold})
            gain += log_loss(of_fold, labels[parts[fold]]) - log_loss(of_fold / temperature, labels[parts[fold]])
        return without(left_out) if gain > 0 else 1.0

    return useful(frozenset()), {fold: useful(frozenset({fold})) for fold in parts}


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature that minimizes the log loss of held-out logits ``(n, classes)`` plus log(T)^2 / 2.

    The second term is a prior: without it, labels that are all predicted correctly give a temperature of 0.
    """

    def loss(log_temperature: float) -> float:
        return log_temperature**2 / 2 + log_loss(logits / np.exp(log_temperature), labels)

    return float(np.exp(minimize_scalar(loss, bounds=_LOG_TEMPERATURES, method="bounded").x))


def calibration_error(confidences: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of the predicted classes, over bins with equal numbers of images.

    It is the mean of |accuracy - confidence| of the bins, of which there are up to 10 with at least 10 images.
    """
    order = np.argsort(confidences, kind="stable")
    bins = np.array_split(order, np.clip(len(order) // _PER_BIN, 1, _BINS))
    return float(sum(abs(np.sum(right[rows]) - np.sum(confidences[rows])) for rows in bins) / len(order))
