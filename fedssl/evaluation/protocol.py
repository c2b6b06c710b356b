"""The interface of evaluation protocols: their input, their call and their combination."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.config.constraints import check_arguments, find_constraint
from fedssl.config.settings import DataSettings
from fedssl.datasets.base import Split, load_split, source_split
from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.images import ImageSource
from fedssl.errors import InputError, sanitize, shortened
from fedssl.evaluation.features import Features, extract, pixels
from fedssl.evaluation.labeled_images import SPLITS, LabeledImages, label_problem
from fedssl.evaluation.scores import ACCURACY, Score, as_scores
from fedssl.logs import log, log_once
from fedssl.machine.devices import CPU
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.machine.out_of_memory import module_on_cpu, retry_in_chunks


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationInput:
    """An encoder and labeled images to evaluate it."""

    # Maps standardized images to representations; None to evaluate raw pixels. It belongs to the run: a protocol that
    # trains it uses a copy.
    encoder: nn.Module | None
    train: LabeledImages
    test: LabeledImages
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]  # per channel, of pixels in [0, 1]
    device: torch.device  # of the encoder
    # Settings of the pixels of the images that the encoder was trained on, see `fedssl.datasets.raster.PIXELS`.
    pixels: Mapping[str, Any] = field(default_factory=dict)
    full: "EvaluationInput | None" = None  # with the same features and predictions, of which these are a part
    rows: Tensor | None = None  # of the test images of ``full``; None: all

    @property
    def num_classes(self) -> int:
        """One more than the highest training label."""
        return int(self.train.labels.max()) + 1

    @cached_property
    def features(self) -> Features:
        """Features of all images by the frozen encoder, computed once for all protocols."""
        if self.full is not None:
            features = self.full.features
            if self.rows is None:
                return features
            return replace(features, test=features.test[self.rows], test_labels=features.test_labels[self.rows])
        train, test = (
            pixels(labeled.images) if self.encoder is None else self.extract(self.encoder, labeled.images)
            for labeled in (self.train, self.test)
        )
        return Features(train, self.train.labels, test, self.test.labels, num_classes=self.num_classes)

    def extract(self, network: nn.Module, images: ImageSource) -> Tensor:
        """Return the output of a frozen network for images, see `fedssl.evaluation.features.extract`."""
        return extract(network, images, mean=self.mean, std=self.std, device=self.device)

    def subset(self, rows: Tensor) -> "EvaluationInput":
        """Return the evaluation input with only the test images at ``rows``; features and predictions are shared."""
        return replace(self, test=self.test.subset(rows), full=self, rows=rows)

    @cached_property
    def labeled(self) -> "EvaluationInput":
        """The evaluation input with only the images that have a label, as if the data set had no others.

        Features and predictions are computed again, with the bits of the labeled images alone.
        """
        if self.full is not None and self.rows is not None:
            whole = self.full.labeled
            if whole is self.full:
                return self
            places = (self.full.test.labels != NO_LABEL).cumsum(0) - 1  # of labeled images among them
            return whole.subset(places[self.rows[self.test.labels != NO_LABEL]])
        train, test = self.train.labeled(), self.test.labeled()
        is_labeled = train is self.train and test is self.test
        return self if is_labeled else replace(self, train=train, test=test, full=None)

    def predict_once(self, key: Hashable, predict: Callable[["EvaluationInput"], Tensor]) -> Tensor:
        """Return the predicted classes of the test images. Call ``predict`` once per key, for all test images.

        Protocols that train a network use this, so that subsets of the test images share one training. The key must
        identify the protocol and its training. ``predict`` is called again, on the CPU, if the device has too little
        memory.
        """
        if self.full is not None and self.rows is not None:
            return self.full.predict_once(key, predict)[self.rows]
        if key not in self._predictions:
            self._predictions[key] = retry_in_chunks(
                lambda device, _: predict(self if device == self.device else self._on_cpu()),
                device=self.device,
                what="a classifier is trained",
            )
        return self._predictions[key]

    @cached_property
    def _predictions(self) -> dict[Hashable, Tensor]:
        return {}

    def _on_cpu(self) -> "EvaluationInput":
        encoder = None if self.encoder is None else module_on_cpu(self.encoder)
        return replace(self, encoder=encoder, device=torch.device(CPU), full=self, rows=None)


def make_evaluation_input(
    encoder: nn.Module | None, data: DataSettings, *, device: torch.device, needs_labels: bool = True
) -> EvaluationInput | None:
    """Join the encoder and the images of the data set; None if they are too few, see `evaluation_problem`.

    Only images with labels are used if the protocol ``needs_labels``.
    """
    train, test = (load_labeled(data, split, needs_labels=needs_labels) for split in SPLITS)
    if train is None or test is None or (needs_labels and label_problem(train, test)):
        return None
    statistics: dict[str, Any] = {"mean": data.mean, "std": data.std, "pixels": data.reader.values}
    return EvaluationInput(encoder=encoder, train=train, test=test, device=device, **statistics)


def evaluation_problem(data: DataSettings, *, needs_labels: bool = True) -> str | None:
    """Return the reason, with a remedy, why the data set cannot evaluate encoders; None if it can."""
    keys = data.reader.values
    labeled = []
    for split, name in SPLITS.items():
        images = load_labeled(data, split, needs_labels=needs_labels)
        if images is not None:
            labeled.append(images)
            continue
        setting = f"dataset.splits.{split}={source_split(data, split) or 'null'}"
        labels = "labeled " * needs_labels
        remedies = [f"set dataset.splits.{split} to a split with {labels}images"]
        if load_split(data, split) is None:
            reason = "names no images"
            if split == "test" and keys.get("test_fraction") == 0 and data.test is not None:
                remedies.append("hold out a share of the training images with dataset.test_fraction=0.2")
            elif split == "test" and not needs_labels and "folders" in keys:  # only labeled images are held out
                remedies.append("divide the files into folders train and test, or a table by a column split")
        else:
            reason = "names images without labels"
            remedies += ["name the column of the labels with dataset.label=COLUMN"] if "label" in keys else []
            remedies += ["use a subfolder for each of two or more classes"] if "folders" in keys else []
        return f"the data set has no {labels}{name} images ({setting} {reason}); {', or '.join(remedies)}"
    problem = label_problem(*labeled) if needs_labels else None
    return problem and f"{problem}, so that nothing can be classified; add images of other classes to dataset.path"


def _log_unknown_classes(evaluation_input: EvaluationInput) -> None:
    """Log how test images of classes count that have no labeled training image; a run has several protocols."""
    train, test = evaluation_input.train, evaluation_input.test
    unknown = ~torch.isin(test.labels, train.labels)
    if unknown.any():
        names = [test.class_name(label) for label in test.labels[unknown].unique().tolist()]
        log_once(
            logging.WARNING,
            f"{int(unknown.sum())} of {len(unknown)} test images count as errors, because no labeled training image "
            f"has their class ({shortened(names)})",
        )
    absent = train.labels[~torch.isin(train.labels, test.labels)].unique().tolist()
    if absent:
        classes = shortened(map(train.class_name, absent))
        log_once(logging.WARNING, f"no test image has the classes {classes}, which results do not cover")


def load_labeled(data: DataSettings, split: Split, *, needs_labels: bool = True) -> LabeledImages | None:
    """Load the images of a split that have a label, or all if none is needed; None if there are none."""
    image_data = load_split(data, split)
    if image_data is None or (needs_labels and image_data.labels is None):
        return None
    labels = torch.full((len(image_data.images),), NO_LABEL) if image_data.labels is None else image_data.labels
    images = LabeledImages(**vars(image_data) | {"labels": labels})
    return images.labeled() if needs_labels else images


class EvaluationProtocol(ABC):
    """An evaluation protocol: from an encoder and labeled images to results, under keys that name the protocol.

    A result is a `Score`, or a plain number, which is an accuracy in [0, 1]. Random draws depend on ``seed`` and the
    labels only, so that representations are compared on the same draws. A protocol that cannot evaluate raw pixels
    returns no result for them.
    """

    # Whether it runs or trains a network by itself. Such a protocol uses torch's random generator and memory of the
    # GPU, so it is not run beside training.
    trains_network: bool = False
    uses_features: bool = True  # `EvaluationInput.features`, whose memory is checked before the first round
    needs_labels: bool = True  # `LabeledImages.labels`; images without a label are evaluated otherwise
    predicts_classes: bool = True  # of test images, by labels of training images

    def __post_init__(self) -> None:
        """Validate the settings, which are the fields of a protocol that is a dataclass."""
        settings = {name: value for name, value in vars(self).items() if not callable(value)}
        check_arguments("evaluation", **{key: settings[key] for key in settings if find_constraint("evaluation", key)})

    @abstractmethod
    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> Mapping[str, Score | float]:
        """Evaluate an encoder."""

    @abstractmethod
    def result_units(self, num_classes: int) -> Mapping[str, str]:
        """Return the unit of each result for an encoder, see `fedssl.evaluation.scores.Score`."""

    def left_out(self, evaluation_input: EvaluationInput) -> Mapping[str, str]:
        """Return the names of declared results that these images cannot give, with the reasons."""
        return {}

    def validate(self, evaluation_input: EvaluationInput, *, feature_dim: int) -> None:
        """Raise an `InputError` if the protocol cannot use the images. Called before the first round.

        Features of the training images must fit into memory. Classes without training or test images are logged.
        """
        if self.needs_labels and self.predicts_classes:
            _log_unknown_classes(evaluation_input)
        count, available = len(evaluation_input.train.labels), available_memory()
        needed = 2 * 4 * feature_dim * count  # float32, twice where a protocol scales them
        if self.uses_features and available is not None and needed > available:
            raise InputError(
                f"{count:,} training images with features of length {feature_dim} need {gigabytes(needed)} of memory "
                f"to be evaluated, and {gigabytes(available)} are available; name another split with "
                "dataset.splits.train=NAME, set dataset.limit, or choose evaluation=none and final_evaluation=none"
            )


def evaluate(protocol: EvaluationProtocol, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
    """Run a protocol and return its results as scores, with the number of test images.

    Results that are not finite are left out, and logged.
    """
    results, count = protocol(evaluation_input, seed=seed), len(evaluation_input.test.labels)
    if not isinstance(results, Mapping):
        raise InputError(
            f"{type(protocol).__name__} returns a {type(results).__name__}; return a dict with a Score for each result"
        )
    try:
        scores = as_scores(results)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{type(protocol).__name__} returns {results!r:.99}; return a Score for each result"
        ) from error
    for name, score in scores.items():
        if score.unit == ACCURACY and math.isfinite(score.value) and not -1e-6 <= score.value <= 1 + 1e-6:
            raise InputError(
                f"{type(protocol).__name__} returns {name}={score.value:g}; an accuracy is between 0 and 1"
            )
    undefined = [name for name, score in scores.items() if not math.isfinite(score.value + (score.std or 0.0))]
    if undefined:
        log.warning("results that are NaN or infinite are left out: %s", sanitize(shortened(undefined)))
    known = {name: score for name, score in scores.items() if name not in undefined}
    return {name: replace(score, num_images=score.num_images or count) for name, score in known.items()}


def evaluate_domains(protocol: EvaluationProtocol, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
    """Run a protocol on all test images, and on those of each domain, see `domain_result`."""
    results = evaluate(protocol, evaluation_input, seed=seed)
    for domain, rows in evaluation_input.test.domains().items():
        scores = evaluate(protocol, evaluation_input.subset(rows), seed=seed)
        results |= {domain_result(name, domain): score for name, score in scores.items()}
    return results


def domain_result(name: str, domain: str) -> str:
    """Return the name of a result on the test images of one domain."""
    return f"{name}_{domain}"


def check_protocol(protocol: object) -> EvaluationProtocol:
    """Return the protocol; raises `InputError` if it is something else."""
    if not isinstance(protocol, EvaluationProtocol):
        raise InputError(
            f"{type(protocol).__name__} is no evaluation protocol; derive it from "
            "fedssl.evaluation.protocol.EvaluationProtocol"
        )
    return protocol


def _check_result_names(protocols: Mapping[str, EvaluationProtocol]) -> None:
    """Raise an `InputError` if two protocols have a result of the same name, of which only one could be stored."""
    owners: dict[str, str] = {}
    for key, protocol in protocols.items():
        names = list(protocol.result_units(num_classes=2))
        same = [name for name in names if name in owners]
        if same:
            remedy = (
                f"set another name, as by evaluation.protocols.{key}.name=NAME, and likewise of final_evaluation"
                if "name" in vars(protocol)
                else f"remove protocols.{key} and evaluate it alone, as by fedssl-evaluate run=DIR evaluation=knn "
                "evaluation.k=20"
            )
            raise InputError(
                f"protocols.{owners[same[0]]} and protocols.{key} both have the results {shortened(same)}, whose names "
                f"must differ; {remedy}"
            )
        owners |= dict.fromkeys(names, key)


class CombinedProtocol(EvaluationProtocol):
    """All ``protocols`` in order, with their results together. Without any there is no result.

    Protocols that need labels get the images that have one; if these are too few, their results are left out.
    """

    def __init__(self, *, protocols: Mapping[str, EvaluationProtocol]) -> None:
        self.protocols = {name: check_protocol(protocol) for name, protocol in protocols.items()}
        _check_result_names(self.protocols)
        self.trains_network = any(protocol.trains_network for protocol in self.protocols.values())
        self.uses_features = any(protocol.uses_features for protocol in self.protocols.values())
        self.needs_labels = all(protocol.needs_labels for protocol in self.protocols.values())

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        results: dict[str, Score] = {}
        for protocol, images, problem in self._divided(evaluation_input):
            results |= {} if problem else evaluate(protocol, images, seed=seed)
        return results

    def result_units(self, num_classes: int) -> dict[str, str]:
        parts = (protocol.result_units(num_classes) for protocol in self.protocols.values())
        return {name: unit for part in parts for name, unit in part.items()}

    def left_out(self, evaluation_input: EvaluationInput) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for protocol, images, problem in self._divided(evaluation_input):
            units = protocol.result_units(evaluation_input.num_classes)
            reasons |= dict.fromkeys(units, problem) if problem else protocol.left_out(images)
        return reasons

    def validate(self, evaluation_input: EvaluationInput, *, feature_dim: int) -> None:
        for protocol, images, problem in self._divided(evaluation_input):
            if not problem:
                protocol.validate(images, feature_dim=feature_dim)

    def _divided(
        self, evaluation_input: EvaluationInput
    ) -> Iterator[tuple[EvaluationProtocol, EvaluationInput, str | None]]:
        """Yield each protocol with its images, and why these give no result, if so."""
        for protocol in self.protocols.values():
            if self.needs_labels or not protocol.needs_labels:
                yield protocol, evaluation_input, None
            else:
                labeled = evaluation_input.labeled
                yield protocol, labeled, label_problem(labeled.train, labeled.test)
