"""Linear probe of several labels per image: an independent logistic regression for each class.

Frozen features are standardized as in `fedssl.evaluation.linear_probe`, and the loss is minimized to convergence.
Unknown labels of an image do not count. Average precision is that of scikit-learn. The mean (macro) is over the classes
whose known test labels have both values; for other classes it is not defined. A class whose known training labels are
all equal cannot be learned: all test images get the same score, and its average precision is its share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError, shortened
from fedssl.evaluation.linear_probe import fit_linear, standardize
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.scores import FRACTION, Score
from fedssl.evaluation.targets import Targets, as_labels, num_known, read_targets, varying
from fedssl.logs import log


def label_scores(train: Tensor, labels: Tensor, test: Tensor, *, l2: float, max_iterations: int) -> Tensor:
    """Return logits of the test images ``(n_test, t)``, 0 for classes whose known labels are all equal.

    Features are float32 ``(n, dim)``; ``labels`` are 0, 1 or NaN, ``(n_train, t)``.
    """
    logits = test.new_zeros(len(test), labels.shape[1])
    learned = varying(labels)
    if not learned.any():
        return logits
    x, x_test = standardize(train, test)
    known = ~labels[:, learned].isnan()
    y, weight = labels[:, learned].nan_to_num().to(x), (known / known.sum(dim=0)).to(x)

    def loss(logits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, y, weight, reduction="sum")

    w, bias = fit_linear(x, loss, outputs=y.shape[1], l2=l2, max_iterations=max_iterations)
    logits[:, learned] = torch.addmm(bias, x_test, w)
    return logits


@dataclass(kw_only=True, eq=False)
class MultiLabel(EvaluationProtocol):
    r"""Mean average precision as ``multi_label_map``; the classes' own are parts of the score.

    $$
    \min_{W, b} \; \sum_c \frac{1}{|K_c|} \sum_{i \in K_c} \log(1 + e^{-(2 y_{ic} - 1)(w_c x_i + b_c)})
    + \frac{\lambda}{2} \lVert W \rVert_F^2 \qquad
    \text{mAP} = \frac{1}{|C|} \sum_{c \in C} \sum_n (R_n - R_{n-1}) P_n
    $$

    with $x_i$ the standardized representation of image i, $K_c$ the training images whose label $y_{ic}$ is known, and
    $P_n$, $R_n$ precision and recall of class c at the n-th highest of its different scores.
    """

    needs_labels = False

    columns: Sequence[str] | None = None
    file: str | None = None
    l2: float = 1e-4
    max_iterations: int = 300

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        from sklearn.metrics import average_precision_score  # slow import

        targets, features = self._read(evaluation_input), evaluation_input.features
        logits = label_scores(
            features.train, targets.train, features.test, l2=self.l2, max_iterations=self.max_iterations
        )
        precisions, usable = {}, varying(targets.test)
        for number in usable.nonzero().flatten().tolist():
            labels, scores = targets.test[:, number].numpy(), logits[:, number].numpy()
            known = ~np.isnan(labels)
            precisions[targets.names[number]] = float(average_precision_score(labels[known], scores[known]))
        count = num_known(targets.test[:, usable])
        return {"multi_label_map": Score.over_parts(precisions, FRACTION, num_images=count)} if precisions else {}

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"multi_label_map": FRACTION}

    def validate(self, evaluation_input: EvaluationInput, *, feature_dim: int) -> None:
        super().validate(evaluation_input, feature_dim=feature_dim)
        targets = self._read(evaluation_input)
        for split, labels in (("training", targets.train), ("test", targets.test)):
            same = [name for name, varies in zip(targets.names, varying(labels).tolist(), strict=True) if not varies]
            reason = f"because their known {split} labels are all equal ({shortened(same)})"
            if len(same) == len(targets.names):
                raise InputError(f"no class can be evaluated, {reason}; add images with and without a label")
            if same:
                effect = "are not part of multi_label_map" if split == "test" else "cannot be learned"
                log.warning("%d of %d classes %s, %s", len(same), len(targets.names), effect, reason)

    def _read(self, evaluation_input: EvaluationInput) -> Targets:
        return read_targets(evaluation_input, columns=self.columns, file=self.file, convert=as_labels)
