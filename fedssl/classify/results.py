"""Text and files of results that ``fedssl-classify`` prints and writes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedssl.classify.classifier import Classifier
from fedssl.classify.label_next import largest_cosines
from fedssl.classify.labeled import LabeledImages
from fedssl.classify.validation import LEVEL, Validation
from fedssl.embedding import Embeddings
from fedssl.embedding.embeddings import unit_features
from fedssl.text_table import align, csv_path

_MAX_LINES = 20  # classes in a table
_MAX_CONFUSED = 5
_USUAL = 0.99  # share of the labeled images that are not unusual


def describe(labeled: LabeledImages, validation: Validation | None, *, temperature: float) -> list[str]:
    """Return the lines about labels and accuracy."""
    classes, counts = labeled.classes, np.bincount(labeled.labels)
    lines = [
        f"{len(labeled.rows):,} labeled images of {len(classes):,} classes, {counts.min():,} to {counts.max():,} each"
    ]
    single = [classes[number] for number in np.flatnonzero(counts == 1)]
    if validation is None:
        return [
            *lines,
            "accuracy: unknown, because a cross-validation needs two classes with two images each, in two groups; "
            "probabilities are not calibrated",
        ]
    low, high = (100 * value for value in validation.interval)
    held_out = len(labeled.rows) - len(validation.rows)
    lines += [
        f"accuracy: {100 * validation.accuracy:.1f}% (Wilson's {100 * LEVEL:g}% interval: {low:.1f} to {high:.1f}), by "
        f"a nested cross-validation with {validation.folds} folds; the most frequent class alone: "
        f"{100 * validation.most_frequent:.1f}%",
        f"calibration error: {100 * validation.error:.1f}%, {_calibration(validation, temperature)} "
        f"({100 * validation.unavoidable_error:.1f}% for a calibrated classifier, because there are only "
        f"{len(validation.rows):,} images)",
    ]
    if held_out:
        which = "1 image is" if held_out == 1 else f"{held_out:,} images are"
        names = f" (such as {single[0]})" if single else ""
        lines.append(
            f"{which} not in the accuracy: no other image, or none of another group, has the same class{names}"
        )
    return [*lines, "", *_tables(labeled.classes, validation)]


def _calibration(validation: Validation, temperature: float) -> str:
    if temperature == 1:
        return "without a temperature, which does not lower the cross-validated log loss"
    return f"with a temperature {100 * validation.calibrated_error:.1f}%"


def _tables(classes: Sequence[str], validation: Validation) -> Iterator[str]:
    """Yield the lowest recalls and the most frequent confusions."""
    order = np.argsort(np.nan_to_num(validation.recalls, nan=2), kind="stable")
    recalls = ["-" if np.isnan(recall) else f"{100 * recall:.0f}" for recall in validation.recalls]
    rows = [[classes[n], f"{validation.counts[n]}", recalls[n]] for n in order[:_MAX_LINES]]
    yield align([["class", "images", "recall (%)"], *rows], left=1)
    if len(classes) > _MAX_LINES:
        yield f"and {len(classes) - _MAX_LINES:,} classes with no lower recall (report=FILE.json has all)"
    confusion = validation.confusion()
    np.fill_diagonal(confusion, 0)
    worst = np.argsort(-confusion, axis=None, kind="stable")[:_MAX_CONFUSED]
    pairs = [np.unravel_index(place, confusion.shape) for place in worst if confusion.flat[place]]
    if pairs:
        listed = (
            f"{classes[true]} as {classes[predicted]} ({confusion[true, predicted]})" for true, predicted in pairs
        )
        yield f"most confused: {', '.join(listed)}"


def report(labeled: LabeledImages, classifier: Classifier, validation: Validation | None) -> dict[str, Any]:
    """Return all results as JSON values."""
    counts = np.bincount(labeled.labels).tolist()
    content: dict[str, Any] = {
        "images": len(labeled.rows),
        "classes": {name: {"images": count} for name, count in zip(labeled.classes, counts, strict=True)},
        "temperature": classifier.temperature,
    }
    if validation is None:
        return content
    for name, recall in zip(labeled.classes, validation.recalls.tolist(), strict=True):
        content["classes"][name]["recall"] = None if np.isnan(recall) else recall
    return content | {
        "validated_images": len(validation.rows),
        "accuracy": validation.accuracy,
        "interval": validation.interval,
        "interval_level": LEVEL,
        "most_frequent_class": validation.most_frequent,
        "calibration_error": validation.error,
        "calibration_error_with_temperature": validation.calibrated_error,
        "calibration_error_of_a_calibrated_classifier": validation.unavoidable_error,
        "confusion": validation.confusion().tolist(),
    }


def distances(labeled: LabeledImages, images: np.ndarray) -> tuple[np.ndarray, float]:
    """Return one minus the cosine of features ``(n, dim)`` with the nearest labeled image, and the limit of usual ones.

    The limit is the 99% quantile of the distances of the labeled images to their nearest one of another group, or the
    largest for fewer than 100 images; with one group it is 2. About 1% of images of the same kind are
    farther away, or one in the number of labeled images.
    """
    known = labeled.known
    center = known.mean(axis=0, dtype=np.float64)
    known = unit_features(known, center=center)
    nearest = np.sort(1 - largest_cosines(known, known, groups=labeled.groups))
    limit = nearest[min(int(np.ceil(_USUAL * (len(nearest) + 1))), len(nearest)) - 1]
    return 1 - largest_cosines(unit_features(images, center=center), known), float(limit)


def prediction_rows(
    images: Embeddings, labeled: LabeledImages, classifier: Classifier, rows: np.ndarray
) -> Iterator[list[object]]:
    """Yield the lines of the CSV file of predictions, the header first."""
    header = ["path", "prediction", "probability", "distance", "unusual"]
    yield [*header, *(f"p({name})" for name in classifier.classes)]
    probabilities = classifier.probabilities(images.features[rows])
    far, limit = distances(labeled, images.features[rows])
    best = probabilities.argmax(axis=1)
    for place, row in enumerate(rows):
        values = probabilities[place]
        yield [
            csv_path(images.names[row]),
            classifier.classes[best[place]],
            f"{values[best[place]]:.4f}",
            f"{far[place]:.4f}",
            "yes" if far[place] > limit else "no",
            *(f"{value:.4g}" for value in values),
        ]
