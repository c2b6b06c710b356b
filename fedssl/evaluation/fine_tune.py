"""Fine-tuning: encoder and a linear classifier are trained together on a share of the labels.

What FedU and FedU2 call semi-supervised evaluation, and with all labels how the papers transfer to other data. The
encoder of the run is copied and stays as it is. Fine-tuning an untrained encoder, which the comparison at the end of a
run has beside the trained one, is training from scratch.

The labelled images are drawn within every class (stratified), the same ones for every encoder. Batch normalisation
learns as well. The number is that of the last epoch; test images take no part in finding it.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from torch import Tensor, nn

from fedssl.errors import InputError
from fedssl.evaluation.classifier import (
    MakeOptimizer,
    MakeSchedule,
    Place,
    Transform,
    Views,
    check_training,
    classifier_of,
    fit,
    predict,
)
from fedssl.evaluation.evaluation_input import EvaluationInput, LabeledImages
from fedssl.evaluation.features import accuracy
from fedssl.evaluation.few_labels import check_shares, stratified_sample
from fedssl.evaluation.protocol import EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY, Score
from fedssl.seeding import numpy_generator


class FineTune(EvaluationProtocol):
    """Accuracy as ``<name>_<share>_percent``, the mean over draws, with their standard deviation.

    Parameters
    ----------
    name : str
        What results are called.
    shares : sequence of float
        Of the labels of every class; one result for each.
    draws : int
        How often the labelled images are drawn.
    epochs, batch_size : int
    optimizer : callable
        Makes one of groups of parameters, each with its learning rate.
    encoder_lr, head_lr : float
        Learning rates of encoder and classifier, at the start.
    lr_schedule : callable or None
        Makes of the optimiser what sets them after every epoch; None: they stay.
    transform, view
        How images are augmented, as in `fedssl.evaluation.classifier.Views`.

    Raises
    ------
    InputError
        A number is out of range.
    """

    trains_network = True
    uses_features = False

    def __init__(
        self,
        *,
        name: str,
        shares: Sequence[float],
        draws: int,
        epochs: int,
        batch_size: int,
        optimizer: MakeOptimizer,
        encoder_lr: float,
        head_lr: float,
        lr_schedule: MakeSchedule | None,
        transform: Transform | None,
        view: Mapping[str, Any],
    ) -> None:
        check_shares(shares)
        if not shares:
            raise InputError("shares=[] of fine-tuning needs shares of the labels, e.g. [0.01,0.1,1.0]")
        if draws < 1:
            raise InputError(f"draws={draws} of fine-tuning must be at least 1")
        for key, lr in (("encoder_lr", encoder_lr), ("head_lr", head_lr)):
            if not 0 <= lr < math.inf:
                raise InputError(f"{key}={lr} of fine-tuning must be a number of at least 0")
        check_training(
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            groups=[{"lr": encoder_lr}, {"lr": head_lr}],
            lr_schedule=lr_schedule,
            view=view,
            of="fine-tuning",
        )
        self.name, self.shares, self.draws = name, tuple(shares), draws
        self.epochs, self.batch_size = epochs, batch_size
        self.optimizer, self.encoder_lr, self.head_lr, self.lr_schedule = optimizer, encoder_lr, head_lr, lr_schedule
        self.transform, self.view = transform, view

    def __call__(self, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Judge the subject on the draws of this seed; raw pixels have no network to train."""
        if subject.encoder is None:
            return {}
        results = {}
        for share in self.shares:
            places = [(seed, "fine tune", f"{share:g}", draw) for draw in range(self.draws)]
            found = [self._accuracy(subject, place, share=share) for place in places]
            std = stdev(found) if len(found) > 1 else None
            results[f"{self.name}_{100 * share:g}_percent"] = Score(mean(found), std=std)
        return results

    def result_units(self, num_classes: int) -> dict[str, str]:
        """Return the unit of each share."""
        return {f"{self.name}_{100 * share:g}_percent": ACCURACY for share in self.shares}

    def _accuracy(self, subject: EvaluationInput, place: Place, *, share: float) -> float:
        predicted = subject.predict_once((self, *place), lambda whole: self._predict(whole, place, share=share))
        return accuracy(predicted, subject.test.labels)

    def _predict(self, subject: EvaluationInput, place: Place, *, share: float) -> Tensor:
        """Train a copy of the encoder and a classifier, and return the classes of the test images."""
        rows = stratified_sample(subject.train.labels, share=share, generator=numpy_generator(*place))
        few = LabeledImages(subject.train.images[rows], subject.train.labels[rows])
        encoder = copy.deepcopy(subject.encoder)
        assert encoder is not None
        encoder.to(subject.device).requires_grad_(True)
        network = nn.Sequential(encoder, classifier_of(encoder, subject))
        views = Views(subject, transform=self.transform, view=self.view, place=place)
        rates = (self.encoder_lr, self.head_lr)
        groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(network, rates, strict=True)]
        network.train()
        fit(
            lambda rows: network(views(few.images[rows])),
            few.labels,
            optimizer=self.optimizer(groups),
            lr_schedule=self.lr_schedule,
            epochs=self.epochs,
            batch_size=self.batch_size,
            generator=views.generator,
        )
        return predict(network, subject)
