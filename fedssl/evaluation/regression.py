"""Ridge regression on frozen features: one or several numbers per image, such as an age, an angle or a pose.

Features are standardized as in `fedssl.evaluation.linear_probe`, and targets by the training images, so that the
penalty has the same meaning for all units. An image whose target is unknown does not count for this target. R2 and
Spearman's rank correlation are those of scikit-learn and SciPy; R2 is 0 for the mean of the test images, and may be
negative. Results of several targets are means over them. A target whose known values are all equal, in training or
test, has no result.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedssl.errors import InputError, shortened
from fedssl.evaluation.linear_probe import standardize
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.scores import ERROR, Score
from fedssl.evaluation.targets import Targets, as_numbers, num_known, read_targets, varying
from fedssl.logs import log


def ridge_predictions(train: Tensor, target: Tensor, test: Tensor, *, l2: float) -> np.ndarray:
    """Predict one target of the test images, float64 ``(n_test,)``, by ridge regression.

    Features are float32 ``(n, dim)``; ``target`` is float64 ``(n_train,)``, NaN if unknown.
    """
    from sklearn.linear_model import Ridge  # slow import

    known = ~target.isnan()
    x, x_test = standardize(train[known].double(), test.double())
    y = target[known]
    center, scale = y.mean(), y.std(correction=0)
    with warnings.catch_warnings(action="ignore"):  # l2=0 and dependent features: the solution of least norm
        model = Ridge(alpha=l2 * len(y)).fit(x.numpy(), ((y - center) / scale).numpy())
    predictions: np.ndarray = model.predict(x_test.numpy()) * scale.item() + center.item()
    return predictions


@dataclass(kw_only=True, eq=False)
class Regression(EvaluationProtocol):
    r"""R2, mean absolute error and Spearman's correlation as ``regression_r2``, ``_mae`` and ``_spearman``.

    $$
    \min_{w, b} \; \frac{1}{n} \sum_{i=1}^{n} \left( \frac{y_i - \mu}{\sigma} - w x_i - b \right)^2
    + \lambda \lVert w \rVert^2 \qquad
    R^2 = 1 - \frac{\sum_i (y_i^* - \hat{y}_i)^2}{\sum_i (y_i^* - \overline{y^*})^2}
    $$

    with $x_i$ the standardized representation of image i, $y_i$ its target, $\mu$ and $\sigma$ the mean and standard
    deviation of the targets, and $y_i^*$, $\hat{y}_i$ the target of test image i and its prediction.
    """

    needs_labels = False

    columns: Sequence[str] | None = None
    file: str | None = None
    l2: float = 1e-3

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        from scipy.stats import spearmanr  # slow imports
        from sklearn.metrics import mean_absolute_error, r2_score

        targets, features = self._read(evaluation_input), evaluation_input.features
        parts: dict[str, dict[str, float]] = {name: {} for name in self.result_units(0)}
        usable = _usable(targets)
        for number in usable.nonzero().flatten().tolist():
            predicted = ridge_predictions(features.train, targets.train[:, number], features.test, l2=self.l2)
            known = ~targets.test[:, number].isnan().numpy()
            expected, predicted = targets.test[:, number].numpy()[known], predicted[known]
            # Equal predictions, as of a collapsed encoder, have no order.
            order = float(spearmanr(expected, predicted).statistic) if np.ptp(predicted) > 0 else 0.0
            values = r2_score(expected, predicted), mean_absolute_error(expected, predicted), order
            for of_result, value in zip(parts.values(), values, strict=True):
                of_result[targets.names[number]] = float(value)
        count = num_known(targets.test[:, usable])
        units = {name: unit for name, unit in self.result_units(0).items() if parts[name]}
        return {name: Score.over_parts(parts[name], unit, num_images=count) for name, unit in units.items()}

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"regression_r2": "", "regression_mae": ERROR, "regression_spearman": ""}

    def validate(self, evaluation_input: EvaluationInput, *, feature_dim: int) -> None:
        super().validate(evaluation_input, feature_dim=2 * feature_dim)  # in float64
        targets = self._read(evaluation_input)
        usable = _usable(targets).tolist()
        constant = [name for name, is_usable in zip(targets.names, usable, strict=True) if not is_usable]
        reason = f"the known values in training or test images are all equal ({shortened(constant)})"
        if not any(usable):
            raise InputError(f"no target can be evaluated, because {reason}; name other columns")
        if constant:
            log.warning("%d of %d targets have no result, because %s", len(constant), len(usable), reason)

    def _read(self, evaluation_input: EvaluationInput) -> Targets:
        return read_targets(evaluation_input, columns=self.columns, file=self.file, convert=as_numbers)


def _usable(targets: Targets) -> Tensor:
    """Return which targets have different known values in both splits."""
    return varying(targets.train) & varying(targets.test)
