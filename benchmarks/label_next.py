"""Which images to label: accuracy with those that fedssl-classify chooses, and with random ones.

    uv run python benchmarks/label_next.py encoder.pt [encoder.pt ...] dataset=digits [dataset.key=value ...]

The encoders are of runs with different seeds. For each, and for raw pixels, 50 images are labeled: as many of each
class ("per class"; fewer than 50 if these cannot be equal numbers), random ones, or typical ones. The classifier
predicts the test images. Then 50, 100 and 200 images with equal numbers per class are labeled, and as many are chosen
in addition: random, typical or uncertain ones. Accuracy in %, mean of three draws, which are the same for all encoders,
with the standard deviation over encoders.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

import numpy as np
import torch

from fedssl.classify.classifier import Classifier, best_penalty, fit
from fedssl.classify.label_next import next_to_label
from fedssl.command_line import run_command
from fedssl.config.load import compose
from fedssl.datasets.base import ImageData, load_split
from fedssl.embedding.embeddings import unit_features
from fedssl.errors import InputError
from fedssl.evaluation.features import extract, pixels
from fedssl.evaluation.sampling import sample_per_class
from fedssl.evaluation.scores import Score
from fedssl.export import load_encoder

DRAWS, FIRST = 3, 50


def fitted(x: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> Classifier:
    names = [str(name) for name in range(labels.max() + 1)]
    l2 = best_penalty(x[rows], labels[rows], classes=names, groups=np.arange(len(rows)), seed=0)
    return fit(x[rows], labels[rows], classes=names, l2=l2)


def choose(x: np.ndarray, known: np.ndarray, count: int, kind: str, model: Classifier | None, seed: int) -> np.ndarray:
    pool = np.setdiff1d(np.arange(len(x)), known)
    if kind == "random":
        return np.random.default_rng(seed).choice(pool, count, replace=False)
    margins = None
    if kind == "uncertain" and model is not None:
        ordered = np.sort(model.probabilities(x[pool]), axis=1)
        margins = ordered[:, -1] - ordered[:, -2]
    unit = unit_features(x, center=x.mean(axis=0, dtype=np.float64))
    return pool[next_to_label(unit[pool], unit[known], count=count, margins=margins, seed=seed)]


def encoders_of(words: Sequence[str]) -> list[str]:
    """Return the arguments without ``=``, which are files of encoders; raises `InputError` without any."""
    encoders = [argument for argument in words if "=" not in argument]
    if not encoders:
        raise InputError("no encoder is given; name encoder.pt of one or more runs before the overrides")
    return encoders


def labeled_splits(overrides: Sequence[str]) -> tuple[ImageData, ImageData]:
    """Return the training and test images; raises `InputError` without labels, or with more classes than `FIRST`."""
    data = compose(overrides).data
    train, test = load_split(data, "train"), load_split(data, "test")
    if train is None or test is None or train.labels is None or test.labels is None:
        raise InputError("the benchmark compares with true labels; choose training and test images that have them")
    if train.labels.max() >= FIRST:
        raise InputError(f"the {FIRST} first labels name every class; choose images with at most {FIRST} classes")
    return train, test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="encoders, and overrides of the data set")
    words = parser.parse_args().words
    encoders = encoders_of(words)
    train, test = labeled_splits([word for word in words if "=" in word])
    assert train.labels is not None
    assert test.labels is not None
    labels, test_labels = train.labels.numpy(), test.labels.numpy()
    classes = int(train.labels.max()) + 1
    results, accuracies = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for file in encoders:
        encoder = load_encoder(file)
        settings = {"mean": encoder.mean, "std": encoder.std, "device": "cpu"}
        x, x_test = (extract(encoder, split.images, **settings).numpy() for split in (train, test))
        accuracies.clear()

        def add(name: str, rows: np.ndarray, x: np.ndarray, x_test: np.ndarray) -> None:
            predictions = fitted(x, labels, rows).logits(x_test).argmax(axis=1)
            accuracies[name].append(float((predictions == test_labels).mean()))

        for draw in range(DRAWS):
            generator = np.random.default_rng(draw)
            each = sample_per_class(train.labels, per_class=FIRST // classes, generator=generator).numpy()
            for source, a, b in (
                ("pixels", pixels(train.images).numpy(), pixels(test.images).numpy()),
                ("encoder", x, x_test),
            ):
                add(f"{source}, per class", each, a, b)
                for kind in ("random", "typical"):
                    add(f"{source}, {kind}", choose(a, each[:0], len(each), kind, None, draw), a, b)
            for number in (50, 100, 200):
                start = sample_per_class(train.labels, per_class=number // classes, generator=generator).numpy()
                model = fitted(x, labels, start)
                for kind in ("random", "typical", "uncertain"):
                    more = choose(x, start, len(start), kind, model, draw)
                    add(f"encoder, {number} and {number} {kind}", np.concatenate([start, more]), x, x_test)
        for name, values in accuracies.items():
            results[name].append(mean(values))
    for name, values in results.items():
        print(f"{name:36} {Score.over_draws(values).text}")


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(run_command("label_next", main))
