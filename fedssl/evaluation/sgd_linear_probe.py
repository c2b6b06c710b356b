"""Linear probes as the papers train them: a linear classifier on the frozen encoder, by an optimiser, for some epochs.

Each paper has its own, which ``conf/evaluation/<paper>/linear.yaml`` says; `fedssl.evaluation.linear_probe` is the
one that
this project compares encoders by. Representations of images that stay as they are, by an encoder in eval mode, are
computed once; else the encoder runs in every epoch, and what it puts out is kept for a batch only, so that maps of all
images need not fit into memory. Images are standardised as in its training.

Batch normalisation in training mode takes its statistics from the batch, and its running statistics, by which test
images are normalised afterwards, move towards those of the training images. A probe of this kind thus judges
another encoder than the one that was averaged: the run's own is copied and stays as it is.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.evaluation.classifier import (
    MakeOptimizer,
    MakeSchedule,
    Place,
    Transform,
    Views,
    check_training,
    classes_of,
    classifier,
    classifier_of,
    fit,
    predict,
)
from fedssl.evaluation.evaluation_input import EvaluationInput
from fedssl.evaluation.features import accuracy
from fedssl.evaluation.few_labels import check_shares, stratified_sample
from fedssl.evaluation.protocol import EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY, Score
from fedssl.machine.devices import to_device
from fedssl.seeding import numpy_generator, torch_generator


class SGDLinearProbe(EvaluationProtocol):
    """Accuracy after the last epoch, as ``<name>`` with all labels and ``<name>_<share>_percent`` with some.

    Parameters
    ----------
    name : str
        What the result is called.
    shares : sequence of float
        Of the labels of every class, which are drawn; one result for each.
    features : {"pooled", "map"}
        Representations h, or the last stage's output before pooling, flattened.
    batch_norm_epochs : int
        For how many epochs, the first ones, batch normalisation is in training mode; 0: it never is.
    epochs, batch_size : int
    optimizer : callable
        Makes one of groups of parameters.
    lr_schedule : callable or None
        Makes of the optimiser what sets learning rates after every epoch; None: they stay.
    transform, view
        How images are augmented, as in `fedssl.evaluation.classifier.Views`.

    Raises
    ------
    InputError
        A setting is out of range; when called, also if the encoder has no feature map or training diverges.
    """

    trains_network = True

    def __init__(
        self,
        *,
        name: str,
        shares: Sequence[float],
        features: str,
        batch_norm_epochs: int,
        epochs: int,
        batch_size: int,
        optimizer: MakeOptimizer,
        lr_schedule: MakeSchedule | None,
        transform: Transform | None,
        view: Mapping[str, Any],
    ) -> None:
        check_shares(shares)
        if not shares:
            raise InputError("shares=[] of a linear probe needs shares of the labels, e.g. [1.0]")
        if features not in ("pooled", "map"):
            raise InputError(f"features={features} of a linear probe is unknown; set features=pooled or features=map")
        if batch_norm_epochs < 0:
            raise InputError(f"batch_norm_epochs={batch_norm_epochs} of a linear probe must be at least 0")
        check_training(
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            groups=[{}],
            lr_schedule=lr_schedule,
            view=view,
            of="a linear probe",
        )
        self.name, self.shares = name, tuple(shares)
        self.features, self.batch_norm_epochs = features, batch_norm_epochs
        self.epochs, self.batch_size, self.optimizer, self.lr_schedule = epochs, batch_size, optimizer, lr_schedule
        self.transform, self.view = transform, view
        self.uses_features = self.features_cacheable

    @property
    def features_cacheable(self) -> bool:
        """Whether features are the same in every epoch, and those that all protocols share."""
        return self.features == "pooled" and not (self.batch_norm_epochs or self.transform or self.view)

    def __call__(self, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Judge the subject; raw pixels only where features are computed once."""
        if subject.encoder is None and not self.features_cacheable:
            return {}
        results = {}
        for share in self.shares:
            place = (seed, "linear probe", self.name, f"{share:g}")
            drawn = stratified_sample(subject.train.labels, share=share, generator=numpy_generator(*place))
            train = self._on_features if self.features_cacheable else self._on_images
            found = subject.predict_once((self, *place), partial(train, drawn=drawn, place=place))
            results[self._result_name(share)] = Score(accuracy(found, subject.test.labels))
        return results

    def result_units(self, num_classes: int) -> dict[str, str]:
        """Return the unit of each share."""
        return {self._result_name(share): ACCURACY for share in self.shares}

    def validate(self, subject: EvaluationInput, *, feature_dim: int) -> None:
        """Refuse feature maps of an encoder without stages; raises `InputError`."""
        super().validate(subject, feature_dim=feature_dim)
        self._check_encoder(subject.encoder)

    def _result_name(self, share: float) -> str:
        return self.name if share == 1 else f"{self.name}_{100 * share:g}_percent"

    def _on_features(self, subject: EvaluationInput, drawn: Tensor, place: Place) -> Tensor:
        """Classes of the test images by a classifier of features that are computed once."""
        data = subject.features
        train = data.train.to(subject.device)
        head = classifier(train.shape[1], subject)
        fit(
            lambda rows: head(train[to_device(drawn[rows], train.device)]),
            data.train_labels[drawn],
            optimizer=self.optimizer([{"params": list(head.parameters())}]),
            lr_schedule=self.lr_schedule,
            epochs=self.epochs,
            batch_size=self.batch_size,
            generator=torch_generator(*place),
        )
        with torch.inference_mode():
            return classes_of(head(data.test.to(subject.device)))

    def _on_images(self, subject: EvaluationInput, drawn: Tensor, place: Place) -> Tensor:
        """Classes of the test images by a classifier of features that are computed anew in every epoch."""
        assert subject.encoder is not None
        encoder = self._copy(subject.encoder).to(subject.device)
        head = classifier_of(encoder, subject)
        views = Views(subject, transform=self.transform, view=self.view, place=place)
        layers = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]

        def logits(rows: Tensor) -> Tensor:
            with torch.no_grad():
                h = encoder(views(subject.train.images[drawn[rows]]))
            scores: Tensor = head(h)
            return scores

        def before_epoch(epoch: int) -> None:
            for layer in layers:
                layer.training = epoch < self.batch_norm_epochs

        fit(
            logits,
            subject.train.labels[drawn],
            optimizer=self.optimizer([{"params": list(head.parameters())}]),
            lr_schedule=self.lr_schedule,
            epochs=self.epochs,
            batch_size=self.batch_size,
            generator=views.generator,
            before_epoch=before_epoch,
        )
        return predict(nn.Sequential(encoder, head), subject)

    def _check_encoder(self, encoder: nn.Module | None) -> None:
        if self.features == "map" and encoder is not None and not isinstance(encoder, Encoder):
            raise InputError(
                f"features=map needs an encoder in stages and {type(encoder).__name__} is none; set features=pooled"
            )

    def _copy(self, encoder: nn.Module) -> nn.Module:
        """Return a copy of the encoder in eval mode that outputs pooled features or feature maps."""
        self._check_encoder(encoder)
        copied = copy.deepcopy(encoder).eval()
        if self.features == "map":
            assert isinstance(copied, Encoder)
            copied.return_feature_map = True
        return copied
