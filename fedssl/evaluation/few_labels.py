"""Linear probe with a few labeled images per class, averaged over draws.

The papers fine-tune on 1% and 10% of the labels. Here the encoder is frozen, so that the result depends on the
representation alone. The labeled images depend only on the seed, the number per class, the draw and the labels of the
data set. All encoders, and raw pixels, are compared on the same draws.

The probe is the same for every representation: `fedssl.evaluation.linear_probe.softmax_regression` on features that are
centered and divided by one number, their root mean square distance from the center over all training images (their
labels are not used). Scaling each feature separately, as in the full probe, costs raw pixels several points (digits,
2 per class: 71% instead of 78%) and does not improve untrained encoders. One scale gives the best baselines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.evaluation.features import Features, accuracy
from fedssl.evaluation.linear_probe import softmax_regression
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.sampling import sample_per_class, stratified_sample
from fedssl.evaluation.scores import ACCURACY, Score
from fedssl.seeding import numpy_generator


def center_and_scale(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale both sets ``(n, dim)`` so that the training set has mean 0 and mean squared length 1."""
    center = train.mean(0)
    train, test = train - center, test - center
    scale = train.square().sum(1).mean().sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # all features equal: a collapsed encoder
    return train / scale, test / scale


@dataclass(kw_only=True, eq=False)
class FewLabels(EvaluationProtocol):
    r"""Accuracy as ``linear_<n>_per_class`` and ``linear_<share>_percent``, means over draws with standard deviations.

    $$
    x_i = \frac{h_i - \bar{h}}{s} \quad s^2 = \frac{1}{n} \sum_{i=1}^{n} \lVert h_i - \bar{h} \rVert^2 \qquad
    \min_{W, b} \; -\frac{1}{|B_d|} \sum_{i \in B_d} \log \operatorname{softmax}(W x_i + b)_{y_i}
    + \frac{\lambda}{2} \lVert W \rVert_F^2
    $$

    with $h_i$ the representation of image i, and $B_d$ the images of draw d: a number per class, or $\max(1,
    \operatorname{round}(r \, n_c))$ of the $n_c$ of every class for a share r. A number is left out if a class has
    fewer images. One draw gives no standard deviation. The default ``l2`` was chosen on raw pixels and untrained
    encoders (digits, CIFAR-10), whose accuracies change by at most about a point between 1e-3 and 1e-4.
    """

    labels_per_class: Sequence[int] = (2, 5)
    shares: Sequence[float] = ()
    draws: int = 10
    l2: float = 1e-3
    max_iterations: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.labels_per_class and not self.shares:
            raise InputError("labels_per_class=[] and shares=[] give no result; set one of them, e.g. shares=[0.1]")
        self._numbers = {f"linear_{number}_per_class": number for number in self.labels_per_class}
        self._shares = {f"linear_{100 * share:g}_percent": share for share in self.shares}

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        data, left_out = evaluation_input.features, self.left_out(evaluation_input)
        train, test = center_and_scale(data.train, data.test)
        scaled = replace(data, train=train, test=test)
        samples: dict[str, tuple[int | str, Callable[..., Tensor]]] = {
            name: (number, partial(sample_per_class, per_class=number))
            for name, number in self._numbers.items()
            if name not in left_out
        }
        for name, share in self._shares.items():
            samples[name] = f"{share:g}", partial(stratified_sample, share=share)
        results = {}
        for name, (key, sample) in samples.items():
            generators = [numpy_generator(seed, "few labels", key, draw) for draw in range(self.draws)]
            drawn = [sample(data.train_labels, generator=generator) for generator in generators]
            results[name] = Score.over_draws([self._accuracy(scaled, rows) for rows in drawn])
        return results

    def result_units(self, num_classes: int) -> dict[str, str]:
        return dict.fromkeys([*self._numbers, *self._shares], ACCURACY)

    def left_out(self, evaluation_input: EvaluationInput) -> dict[str, str]:
        """Return the results for which a class has too few labeled images."""
        train = evaluation_input.train
        labels, counts = train.labels.unique(return_counts=True)
        rarest, count = int(labels[counts.argmin()]), int(counts.min())
        reason = f"class {train.class_name(rarest)} has {count} labeled training image{'s' * (count > 1)}"
        return {name: reason for name, number in self._numbers.items() if number > count}

    def _accuracy(self, data: Features, rows: Tensor) -> float:
        labels, rows = data.train_labels.to(data.train.device), rows.to(data.train.device)
        weight, bias = softmax_regression(
            data.train[rows],
            labels[rows],
            num_classes=data.num_classes,
            l2=self.l2,
            max_iterations=self.max_iterations,
        )
        return accuracy(torch.addmm(bias, data.test, weight).argmax(dim=1), data.test_labels)
