"""Durations and memory of the evaluations of a run, measured on the untrained encoder.

An evaluation that takes long, compared with the training of the run, is measured on two parts of the images and
extrapolated to all: features and probes take time in proportion to the images. A quadratic term, as of nearest
neighbors, could not be told from noise on small parts, and is small: 50,000 training images need seconds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol, LabeledImages, evaluate
from fedssl.machine.memory import peak_memory
from fedssl.methods.base import build_method
from fedssl.plots.partition import save_partition_plot
from fedssl.seeding import torch_generator
from server_app.build import RunComponents
from strategies.types import GLOBAL

PART = 1000  # least training images of the first measurement; the second has twice as many
MIN_SECONDS = 8.0  # an evaluation of this duration is never extrapolated
SHARE = 0.1  # longest complete measurement, as a share of the training of a run
FIGURES = 3  # that a run plots at its end


@dataclass(frozen=True, kw_only=True)
class EvaluationCost:
    """Seconds of evaluations."""

    round: float = 0.0  # of a model in a round
    observation: float = 0.0  # of the collapse metrics of a model
    final: float = 0.0  # of a model at the end
    baselines: float = 0.0  # of the untrained encoder and raw pixels at the end
    figures: float = 0.0
    is_extrapolated: bool = False
    further_memory: int = 0  # bytes of evaluations on all images beyond the measured ones


@dataclass(frozen=True)
class _Cost:
    """Seconds of an evaluation, and bytes beyond the measured peak."""

    seconds: float
    memory: int = 0
    is_extrapolated: bool = False


def measure_evaluation(components: RunComponents, *, training: float) -> EvaluationCost:
    """Measure all evaluations. ``training`` are the seconds of the training of a run."""
    settings, method, monitor = components.settings, components.method, components.monitor
    evaluator, evaluation = components.evaluator, settings.evaluation
    longest = max(MIN_SECONDS, SHARE * training)
    given = evaluator.evaluation_input(method)
    parts = [_Cost(0.0)] * 3
    observation = 0.0
    if evaluation.every and monitor is not None:
        layers = components.context.initial_model().layers
        observation = min(seconds_of(lambda: monitor.finish({GLOBAL: layers})) for _ in range(2))
    if given is not None:
        untrained = build_method(settings.model).to(components.device)
        raw = replace(given, encoder=None)
        encoder = replace(given, encoder=untrained.encoder)
        final: EvaluationProtocol = evaluation.final_protocol.instantiate()
        if evaluation.every:
            parts[0] = _measure(evaluation.protocol.instantiate(), given, seed=settings.seed, longest=longest)
        for number, each in enumerate((encoder, raw), 1):
            parts[number] = _measure(final, each, seed=settings.seed, longest=longest)
    _plot_partition(components)  # slow imports
    return EvaluationCost(
        round=parts[0].seconds,
        observation=observation,
        final=parts[1].seconds,
        baselines=parts[1].seconds + parts[2].seconds,
        figures=FIGURES * seconds_of(lambda: _plot_partition(components)),
        is_extrapolated=any(part.is_extrapolated for part in parts),
        further_memory=max(part.memory for part in parts),
    )


def _measure(protocol: EvaluationProtocol, given: EvaluationInput, *, seed: int, longest: float) -> _Cost:
    """Return the seconds of a protocol, and the bytes that all images need beyond the measured ones."""

    def run(share: float) -> float:
        part = given if share >= 1 else _subset(given, share)
        return seconds_of(lambda: evaluate(protocol, part, seed=seed))

    # The solver of linear probes is slower with fewer images than features.
    dim = given.train.images[:1].numel() if given.encoder is None else PART // 2
    first = min(1.0, max(PART, 2 * dim) / len(given.train.images))
    if 2 * first >= 1:
        return _Cost(run(1.0))
    run(first / 2)  # warm-up
    shares, seconds, peaks = (first, 2 * first), [], []
    for share in shares:
        seconds.append(min(run(share) for _ in range(2)))
        peaks.append(peak_memory())
    expected = extrapolate(seconds, shares)
    if expected <= longest:
        return _Cost(run(1.0))
    return _Cost(expected, int(extrapolate(peaks, shares)) - peaks[1], is_extrapolated=True)


def extrapolate(values: Sequence[float], shares: tuple[float, float]) -> float:
    """Return the value for all images from those of two shares of them, which grows linearly and does not shrink."""
    one, two = values
    return two + max(0.0, two - one) / (shares[1] - shares[0]) * (1 - shares[1])


def _subset(given: EvaluationInput, share: float) -> EvaluationInput:
    """Return a random part of the training and test images."""

    def draw(images: LabeledImages) -> LabeledImages:
        order = torch.randperm(len(images.images), generator=torch_generator(0, "part"))
        rows = order[: max(2, round(share * len(order)))].sort().values
        return images.subset(rows)

    return replace(given, train=draw(given.train), test=draw(given.test))


def _plot_partition(components: RunComponents) -> None:
    assert components.client_data is not None
    image_data, parts = components.client_data.image_data, components.client_data.parts
    with TemporaryDirectory(prefix="fedssl-plan-") as folder:
        save_partition_plot(Path(folder) / "partition.png", parts, image_data.labels, image_data.classes)


def seconds_of(function: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
