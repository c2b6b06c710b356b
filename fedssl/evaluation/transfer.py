"""Transfer: a protocol on other data sets than the run's, such as the source domain of a pretrained encoder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from fedssl.config.component import Component
from fedssl.config.constraints import check_arguments
from fedssl.config.typed_settings import read_data
from fedssl.datasets.raster import adopt_pixels
from fedssl.errors import InputError
from fedssl.evaluation.protocol import (
    EvaluationInput,
    EvaluationProtocol,
    check_protocol,
    evaluate,
    evaluation_problem,
    make_evaluation_input,
)
from fedssl.evaluation.scores import Score


class Transfer(EvaluationProtocol):
    r"""Results of a protocol on each data set, as ``<result>@<name of the data set>``.

    Images are resized to the encoder's size, and scaled and standardized as in its training. A data set with another
    window, percentiles, background or dtype keeps them.

    $$
    a_A = \frac{1}{n_A^*} \, \left| \{ i : \hat{y}_i = y_i^* \} \right|
    $$

    with $y_i^*$ the classes of the $n_A^*$ test images of data set A, and $\hat{y}_i$ those predicted by the protocol,
    fitted on the training images of A.
    """

    def __init__(
        self,
        *,
        protocol: Mapping[str, Any],
        datasets: Mapping[str, Mapping[str, Any]],
        include_own: bool = False,
    ) -> None:
        check_arguments("evaluation", include_own=include_own)
        if not datasets:
            raise InputError(
                "evaluation=transfer or domains needs a data set: add +dataset@evaluation.datasets.NAME=CHOICE, and "
                "its settings as evaluation.datasets.NAME.KEY=VALUE (final_evaluation instead of evaluation for the "
                "end of a run)"
            )
        self.protocol = check_protocol(Component(protocol).instantiate())
        self.trains_network, self.uses_features = self.protocol.trains_network, self.protocol.uses_features
        self.needs_labels = self.protocol.needs_labels
        self.datasets = {name: read_data(OmegaConf.create(dict(node))) for name, node in datasets.items()}
        self.include_own = include_own

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        results = evaluate(self.protocol, evaluation_input, seed=seed) if self.include_own else {}
        if evaluation_input.rows is not None:  # a domain of the run's data set, which others do not have
            return results
        for name in self.datasets:
            scores = evaluate(self.protocol, self._with_dataset(name, evaluation_input), seed=seed)
            results |= {f"{key}@{name}": score for key, score in scores.items()}
        return results

    def result_units(self, num_classes: int) -> dict[str, str]:
        units = self.protocol.result_units(num_classes)
        others = {f"{key}@{name}": unit for name in self.datasets for key, unit in units.items()}
        return {**(units if self.include_own else {}), **others}

    def left_out(self, evaluation_input: EvaluationInput) -> dict[str, str]:
        own = self.protocol.left_out(evaluation_input) if self.include_own else {}
        others = {name: self.protocol.left_out(self._with_dataset(name, evaluation_input)) for name in self.datasets}
        return {**own, **{f"{key}@{name}": why for name, part in others.items() for key, why in part.items()}}

    def validate(self, evaluation_input: EvaluationInput, *, feature_dim: int) -> None:
        if self.include_own:
            self.protocol.validate(evaluation_input, feature_dim=feature_dim)
        for name in self.datasets:
            self.protocol.validate(self._with_dataset(name, evaluation_input), feature_dim=feature_dim)

    def _with_dataset(self, name: str, evaluation_input: EvaluationInput) -> EvaluationInput:
        _, channels, size, _ = evaluation_input.train.images.shape
        data = self.datasets[name].resized(size)
        if data.channels != channels:
            raise InputError(
                f"the encoder needs images with {channels} channel(s) but datasets.{name}.channels={data.channels}; "
                f"set datasets.{name}.channels={channels}, which converts between gray and RGB only"
            )
        data = replace(data, reader=Component(adopt_pixels(data.reader.values, evaluation_input.pixels)))
        needs_labels = self.protocol.needs_labels
        other = make_evaluation_input(None, data, device=evaluation_input.device, needs_labels=needs_labels)
        if other is None:
            raise InputError(f"datasets.{name}: {evaluation_problem(data, needs_labels=needs_labels)}")
        return replace(evaluation_input, train=other.train, test=other.test, full=None, rows=None)
