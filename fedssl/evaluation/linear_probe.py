"""Linear probe: multinomial logistic regression on frozen features, solved to convergence.

The papers train a linear layer by SGD or Adam on cached features for 50 to 200 epochs without weight decay (EasyFL and
FedU2: Adam, 200 epochs; L-DAWA: SGD, 100 epochs on the unpooled map) and report the last epoch. Here the same loss is
minimized by L-BFGS over all training images, on standardized features: no learning rate, no batch order, the same
result every time. On CIFAR-10 it agrees with 100 epochs of SGD to 0.1 point. Test images have no influence on the
solution. `fedssl.evaluation.sgd_linear_probe` has the papers' probes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.evaluation.features import Features, accuracy
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY, Score


def softmax_regression(
    x: Tensor, labels: Tensor, *, num_classes: int, l2: float, max_iterations: int = 300
) -> tuple[Tensor, Tensor]:
    """Minimize mean cross-entropy + l2 / 2 * ||weight||^2, see `fit_linear`.

    ``labels`` are int64 ``(n,)`` on the device of ``x``. Return the weight ``(dim, num_classes)`` and the bias
    ``(num_classes,)``.
    """

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    return fit_linear(x, loss, outputs=num_classes, l2=l2, max_iterations=max_iterations)


def fit_linear(
    x: Tensor, loss: Callable[[Tensor], Tensor], *, outputs: int, l2: float, max_iterations: int
) -> tuple[Tensor, Tensor]:
    """Minimize a convex loss of x weight + bias, plus l2 / 2 * ||weight||^2, by L-BFGS, starting from zero.

    With more images than features, L-BFGS runs in coordinates in which the second moment of the features is about the
    identity. The minimum is the same and needs a tenth of the iterations, usually fewer than 100.

    ``x`` are features ``(n, dim)``; ``loss`` maps ``(n, outputs)`` to a number. ``l2=0`` disables the penalty; the bias
    is not penalized. Return the weight ``(dim, outputs)`` and the bias ``(outputs,)``.
    """
    dim = x.shape[1]
    u = x.new_zeros(dim, outputs, requires_grad=True)
    bias = x.new_zeros(outputs, requires_grad=True)
    factor = _cholesky_factor(x, l2=l2) if len(x) > dim else None

    def weight() -> Tensor:
        return u if factor is None else torch.linalg.solve_triangular(factor.T, u, upper=True)

    optimizer = torch.optim.LBFGS(
        [u, bias],
        max_iter=max_iterations,
        history_size=20,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,  # not relative: that of separable classes is 1e-3 at the optimum
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        w = weight()
        objective = loss(torch.addmm(bias, x, w)) + l2 / 2 * w.square().sum()
        objective.backward()
        return objective

    optimizer.step(closure)
    return weight().detach(), bias.detach()


def _cholesky_factor(x: Tensor, *, l2: float) -> Tensor:
    """Return the lower triangular L with L L^T = second moment of ``x`` plus a multiple of the identity."""
    moment = x.T @ x / len(x)
    diagonal = moment.diagonal()
    diagonal += l2 + 1e-3 * diagonal.mean().clamp_min(1e-12)
    factor: Tensor = torch.linalg.cholesky(moment)
    return factor


def standardize(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale features ``(n, dim)`` by the training set to mean 0 and std 1; constant ones become 0."""
    mean, std = train.mean(0), train.std(0, correction=0)
    std = torch.where(
        std > 1e-6 * mean.abs(), std, torch.ones_like(std)
    )  # a constant feature varies by less, from rounding
    return (train - mean) / std, (test - mean) / std


def linear_probe(features: Features, *, l2: float, max_iterations: int = 300) -> Tensor:
    """Predict the classes of the test images ``(n_test,)`` by `softmax_regression` on standardized features."""
    x, x_test = standardize(features.train, features.test)
    labels = features.train_labels.to(x.device)
    weight, bias = softmax_regression(x, labels, num_classes=features.num_classes, l2=l2, max_iterations=max_iterations)
    return torch.addmm(bias, x_test, weight).argmax(dim=1)


@dataclass(kw_only=True, eq=False)
class LinearProbe(EvaluationProtocol):
    r"""Accuracy of `linear_probe` as ``linear``.

    $$
    x_{if} = \frac{h_{if} - \mu_f}{\sigma_f} \qquad
    \min_{W, b} \; -\frac{1}{n} \sum_{i=1}^{n} \log \operatorname{softmax}(W x_i + b)_{y_i}
    + \frac{\lambda}{2} \lVert W \rVert_F^2
    $$

    with $h_{if}$ feature f of the representation of image i, $\mu_f$ and $\sigma_f$ its mean and standard deviation,
    and $\lambda$ the ``l2``. Its small default changes CIFAR-10 by less than 0.2 point and has a solution for separable
    classes (digits), for which 0 has none.
    """

    l2: float = 1e-4
    max_iterations: int = 300

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        features = evaluation_input.features
        predictions = linear_probe(features, l2=self.l2, max_iterations=self.max_iterations)
        return {"linear": Score(accuracy(predictions, features.test_labels))}

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"linear": ACCURACY}
