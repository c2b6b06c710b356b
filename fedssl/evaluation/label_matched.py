"""Label-matched test images of a client: a subset with the client's class frequencies."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedssl.evaluation.features import Features
from fedssl.evaluation.protocol import EvaluationInput


def sample_label_matched(test: Tensor, local: Tensor, *, generator: torch.Generator) -> Tensor:
    """Draw the largest set of test images with the class frequencies of the client; return its sorted indices, int64.

    ``test`` and ``local`` are the classes of the test images and of the client's images, int64, ``(n,)`` and ``(m,)``.
    Classes without test images are ignored; the set is empty if no test image has a class of the client. A class with
    share p of the client's images gets floor(p N) images, where N is the size of the set without rounding.
    """
    rows = {int(name): (test == name).nonzero().flatten() for name in local.unique()}
    counts = {name: int((local == name).sum()) for name, indices in rows.items() if len(indices)}
    if not counts:
        return torch.empty(0, dtype=torch.int64)
    # The scarcest class relative to its share contributes all its images. Integers avoid rounding errors.
    scarcest = min(counts, key=lambda name: len(rows[name]) / counts[name])
    sampled = []
    for name, count in counts.items():
        size = count * len(rows[scarcest]) // counts[scarcest]
        sampled.append(rows[name][torch.randperm(len(rows[name]), generator=generator)[:size]])
    return torch.cat(sampled).sort().values


@dataclass(frozen=True, eq=False, kw_only=True)
class SubsetInput(EvaluationInput):
    """An evaluation input with a subset of the test images; it reuses the features of the full one."""

    full: EvaluationInput
    rows: Tensor

    @cached_property
    def features(self) -> Features:
        features = self.full.features
        return replace(features, test=features.test[self.rows], test_labels=features.test_labels[self.rows])

    def predict_once(self, key: Hashable, predict: Callable[[EvaluationInput], Tensor]) -> Tensor:
        return self.full.predict_once(key, predict)[self.rows]


def subset(evaluation_input: EvaluationInput, rows: Tensor) -> SubsetInput:
    """Return the evaluation input with only the test images at ``rows``."""
    test = evaluation_input.test.subset(rows)
    return SubsetInput(
        encoder=evaluation_input.encoder,
        train=evaluation_input.train,
        test=test,
        mean=evaluation_input.mean,
        std=evaluation_input.std,
        device=evaluation_input.device,
        full=evaluation_input,
        rows=rows,
    )
