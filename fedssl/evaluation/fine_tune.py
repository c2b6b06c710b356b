"""Fine-tuning: encoder and a linear classifier are trained together on a share of the labels.

FedU and FedU2 call this semi-supervised evaluation. With all labels it is the papers' transfer to other data sets. The
run's encoder is copied and not changed. Fine-tuning an untrained encoder, for the comparison at the end of a run, is
training from scratch.

The labeled images are drawn per class (stratified), the same for every encoder. Batch normalization is trained, too.
The result is that of the last epoch; test images have no influence on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedssl.evaluation.classifier import ClassifierTraining, SeedPath, make_classifier, predict
from fedssl.evaluation.protocol import EvaluationInput
from fedssl.evaluation.scores import Score
from fedssl.tuning import plain_copy


@dataclass(kw_only=True, eq=False)
class FineTune(ClassifierTraining):
    r"""Accuracy as ``<name>_<share>_percent``: mean and standard deviation over draws.

    ``encoder_lr`` and ``head_lr`` are the initial learning rates of encoder and classifier.

    $$
    \min_{\theta, W, b} \; -\frac{1}{m} \sum_{i=1}^{m} \log \operatorname{softmax}(W f_\theta(T(x_i)) + b)_{y_i} \qquad
    \eta_e = \eta \, \frac{1 + \cos(\pi e / E)}{2} \text{ (cosine)}
    $$

    with $f_\theta$ a copy of the encoder, T the augmentation, $x_i$ the m drawn images, and $\eta_e$ the learning rate
    of epoch e of E.
    """

    uses_features = False
    title: ClassVar[str] = "fine-tuning"

    draws: int
    encoder_lr: float
    head_lr: float

    @property
    def group_settings(self) -> Sequence[Mapping[str, float]]:
        return [{"lr": self.encoder_lr}, {"lr": self.head_lr}]

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Evaluate the encoder on the draws of this seed; raw pixels have no network to train."""
        if evaluation_input.encoder is None:
            return {}
        results = {}
        for share in self.shares:
            seed_paths = [(seed, "fine tune", f"{share:g}", draw) for draw in range(self.draws)]
            accuracies = [self.accuracy(evaluation_input, share, seed_path) for seed_path in seed_paths]
            results[self.result_name(share)] = Score.over_draws(accuracies)
        return results

    def train(self, evaluation_input: EvaluationInput, rows: Tensor, seed_path: SeedPath) -> Tensor:
        few = evaluation_input.train.subset(rows)
        assert evaluation_input.encoder is not None
        encoder = plain_copy(evaluation_input.encoder).to(evaluation_input.device)
        classifier = make_classifier(encoder, evaluation_input)
        network = nn.Sequential(encoder, classifier)
        views = self.views(evaluation_input, seed_path)
        network.train()
        self.fit(
            lambda batch: network(views(few.images[batch])),
            few.labels,
            modules=[encoder, classifier],
            generator=views.generator,
        )
        return predict(network, evaluation_input)
