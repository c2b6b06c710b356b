"""Test images for one client: some of all, in which classes are as frequent as among its own."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedssl.evaluation.evaluation_input import EvaluationInput, LabeledImages
from fedssl.evaluation.features import Features


def sample_label_matched(test: Tensor, own: Tensor, *, generator: torch.Generator) -> Tensor:
    """Where test images are that are like the client's: as many as there can be, drawn anew in every class.

    Parameters
    ----------
    test : Tensor
        Classes of the test images, int64 ``(n,)``.
    own : Tensor
        Classes of the client's images, int64 ``(m,)``. Those that no test image has are left out.
    generator : torch.Generator
        On the CPU.

    Returns
    -------
    Tensor
        int64, sorted; empty if the client has none of the classes. A class of which the client has the share p is
        floor(p N) of the N that would be taken if numbers could be cut.
    """
    rows = {int(name): (test == name).nonzero().flatten() for name in own.unique()}
    counts = {name: int((own == name).sum()) for name, places in rows.items() if len(places)}
    if not counts:
        return torch.empty(0, dtype=torch.int64)
    # The class that is the scarcest for its share gives all that it has; whole numbers, so that nothing is rounded.
    scarce = min(counts, key=lambda name: len(rows[name]) / counts[name])
    taken = []
    for name, count in counts.items():
        number = count * len(rows[scarce]) // counts[scarce]
        taken.append(rows[name][torch.randperm(len(rows[name]), generator=generator)[:number]])
    return torch.cat(taken).sort().values


@dataclass(frozen=True, eq=False, kw_only=True)
class SubsetInput(EvaluationInput):
    """A subject with some of its test images; features of the whole are used."""

    whole: EvaluationInput
    rows: Tensor

    @cached_property
    def features(self) -> Features:
        """Those of the whole, of which the test images are taken."""
        found = self.whole.features
        return Features(
            found.train,
            found.train_labels,
            found.test[self.rows],
            found.test_labels[self.rows],
            num_classes=found.num_classes,
        )

    def predict_once(self, key: Hashable, predict: Callable[[EvaluationInput], Tensor]) -> Tensor:
        """Return the predictions of the whole for these test images."""
        return self.whole.predict_once(key, predict)[self.rows]


def subset(subject: EvaluationInput, rows: Tensor) -> SubsetInput:
    """The subject with the test images of these rows alone."""
    test = LabeledImages(subject.test.images[rows], subject.test.labels[rows])
    return SubsetInput(
        encoder=subject.encoder,
        train=subject.train,
        test=test,
        mean=subject.mean,
        std=subject.std,
        device=subject.device,
        whole=subject,
        rows=rows,
    )
