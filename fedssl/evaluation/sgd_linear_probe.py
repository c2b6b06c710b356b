"""Linear probes of the papers: a linear classifier on the frozen encoder, trained by an optimizer for some epochs.

``conf/evaluation/<paper>/linear.yaml`` has each paper's settings. `fedssl.evaluation.linear_probe` is the project's own
probe. Features without augmentation, by an encoder in eval mode, are computed once. Otherwise the encoder runs in every
epoch and its output is kept for one batch only, so that feature maps of all images need not fit into memory. Images are
standardized as in training.

Batch normalization in training mode uses the statistics of the batch. Its running statistics, which normalize the test
images, move towards those of the training images. Such a probe therefore evaluates another encoder than the averaged
one; it changes a copy of the run's encoder.
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.evaluation.classifier import (
    ClassifierTraining,
    SeedPath,
    make_classifier,
    predict,
    predicted_classes,
    zero_classifier,
)
from fedssl.evaluation.protocol import EvaluationInput
from fedssl.evaluation.scores import Score
from fedssl.machine.devices import to_device
from fedssl.seeding import torch_generator


@dataclass(kw_only=True, eq=False)
class SGDLinearProbe(ClassifierTraining):
    r"""Accuracy after the last epoch, as ``<name>`` with all labels and ``<name>_<share>_percent`` with a share.

    $$
    \min_{W, b} \; -\frac{1}{m} \sum_{i=1}^{m} \log \operatorname{softmax}(W h_i + b)_{y_i}
    \qquad h_i = f_\theta(T(x_i))
    $$

    with $f_\theta$ the frozen encoder, T the augmentation, and $x_i$ the m drawn images: $\max(1,
    \operatorname{round}(r \, n_c))$ of the $n_c$ of every class for a share r.
    """

    title: ClassVar[str] = "a linear probe"

    features: str  # "pooled" for representations h, or "map" for the last stage's output before pooling, flattened
    batch_norm_epochs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.uses_features = self.features_cacheable

    @property
    def features_cacheable(self) -> bool:
        """Whether features are the same in every epoch, and those that all protocols share."""
        return self.features == "pooled" and not (self.batch_norm_epochs or self.transform or self.view)

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Evaluate the encoder; raw pixels only if features are computed once."""
        if evaluation_input.encoder is None and not self.features_cacheable:
            return {}
        return {
            self.result_name(share): Score(
                self.accuracy(evaluation_input, share, (seed, "linear probe", self.name, f"{share:g}"))
            )
            for share in self.shares
        }

    def validate(self, evaluation_input: EvaluationInput, *, feature_dim: int) -> None:
        super().validate(evaluation_input, feature_dim=feature_dim)
        self._check_encoder(evaluation_input.encoder)

    def result_name(self, share: float) -> str:
        return self.name if share == 1 else super().result_name(share)

    def train(self, evaluation_input: EvaluationInput, rows: Tensor, seed_path: SeedPath) -> Tensor:
        train = self._on_features if self.features_cacheable else self._on_images
        return train(evaluation_input, rows, seed_path)

    def _on_features(self, evaluation_input: EvaluationInput, rows: Tensor, seed_path: SeedPath) -> Tensor:
        features = evaluation_input.features
        train = features.train.to(evaluation_input.device)
        classifier = zero_classifier(train.shape[1], evaluation_input)
        rows_there = to_device(rows, train.device)
        self.fit(
            lambda batch: classifier(train[rows_there[batch]]),
            features.train_labels[rows],
            modules=[classifier],
            generator=torch_generator(*seed_path),
            indices_on=train.device,
        )
        with torch.no_grad():
            return predicted_classes(classifier(features.test.to(evaluation_input.device)))

    def _on_images(self, evaluation_input: EvaluationInput, rows: Tensor, seed_path: SeedPath) -> Tensor:
        assert evaluation_input.encoder is not None
        self._check_encoder(evaluation_input.encoder)
        encoder = copy.deepcopy(evaluation_input.encoder).eval().to(evaluation_input.device)
        if self.features == "map":
            assert isinstance(encoder, Encoder)
            encoder.return_feature_map = True
        classifier = make_classifier(encoder, evaluation_input)
        views = self.views(evaluation_input, seed_path)
        batch_norms = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]

        def logits(batch: Tensor) -> Tensor:
            with torch.no_grad():
                h = encoder(views(evaluation_input.train.images[rows[batch]]))
            scores: Tensor = classifier(h)
            return scores

        def before_epoch(epoch: int) -> None:
            for module in batch_norms:
                module.training = epoch < self.batch_norm_epochs

        self.fit(
            logits,
            evaluation_input.train.labels[rows],
            modules=[classifier],
            generator=views.generator,
            before_epoch=before_epoch,
        )
        return predict(nn.Sequential(encoder, classifier), evaluation_input)

    def _check_encoder(self, encoder: nn.Module | None) -> None:
        if self.features == "map" and encoder is not None and not isinstance(encoder, Encoder):
            raise InputError(
                f"features=map needs an encoder in stages and {type(encoder).__name__} is none; set features=pooled"
            )
