"""Linear probe: multinomial logistic regression on frozen features, solved to convergence.

The papers train a linear layer by SGD or Adam on cached features for 50 to 200 epochs without weight decay (EasyFL and
FedU2: Adam, 200 epochs; L-DAWA: SGD, 100 epochs on the unpooled map) and report the last epoch. Here the same loss is
minimised by L-BFGS over all training images, on standardised features: no learning rate, no batch order, the same
number every time. On CIFAR-10 it agrees with 100 epochs of SGD to 0.1 point. The number is that of the solution; test
images take no part in finding it. The papers' own probes are those of `fedssl.evaluation.sgd_linear_probe`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError
from fedssl.evaluation.evaluation_input import EvaluationInput
from fedssl.evaluation.features import accuracy
from fedssl.evaluation.protocol import EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY, Score


def softmax_regression(
    x: Tensor, labels: Tensor, *, num_classes: int, l2: float, max_iterations: int = 300
) -> tuple[Tensor, Tensor]:
    """Minimise mean cross-entropy + l2 / 2 * ||weight||^2 by L-BFGS, starting from zero.

    Features are correlated, so with more images than features the search runs in coordinates in which their second
    moment is about the identity. The minimum is the same and is reached in a tenth of the iterations.

    Parameters
    ----------
    x : Tensor
        Features ``(n, dim)``.
    labels : Tensor
        int64, ``(n,)``, on the same device.
    num_classes : int
    l2 : float
        Weight of the penalty; 0 turns it off. The bias is not penalised.
    max_iterations : int
        Upper bound; it usually stops below 100.

    Returns
    -------
    tuple of Tensor
        Weight ``(dim, num_classes)`` and bias ``(num_classes,)``.
    """
    dim = x.shape[1]
    u = x.new_zeros(dim, num_classes, requires_grad=True)
    bias = x.new_zeros(num_classes, requires_grad=True)
    factor = _cholesky_factor(x, l2=l2) if len(x) > dim else None

    def weight() -> Tensor:
        return u if factor is None else torch.linalg.solve_triangular(factor.T, u, upper=True)

    optimizer = torch.optim.LBFGS(
        [u, bias],
        max_iter=max_iterations,
        history_size=20,
        tolerance_grad=1e-6,
        tolerance_change=1e-7,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        w = weight()
        loss = F.cross_entropy(torch.addmm(bias, x, w), labels) + l2 / 2 * w.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight().detach(), bias.detach()


def _cholesky_factor(x: Tensor, *, l2: float) -> Tensor:
    """Lower triangular L with L L^T = second moment of ``x`` plus enough of the identity to be well-conditioned."""
    moment = x.T @ x / len(x)
    diagonal = moment.diagonal()
    diagonal += l2 + 1e-3 * diagonal.mean().clamp_min(1e-12)
    factor: Tensor = torch.linalg.cholesky(moment)
    return factor


def standardise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both sets ``(n, dim)`` with every feature shifted and scaled to mean 0 and deviation 1 over the training set.

    A feature that is constant there becomes 0 and is not scaled.
    """
    mean, std = train.mean(0), train.std(0, correction=0)
    std = torch.where(std > 1e-6 * mean.abs(), std, torch.ones_like(std))  # rounding makes a constant vary by less
    return (train - mean) / std, (test - mean) / std


def linear_probe(
    train: Tensor, labels: Tensor, test: Tensor, *, num_classes: int, l2: float, max_iterations: int = 300
) -> Tensor:
    """Classes of the test images ``(n_test,)`` by `softmax_regression` on standardised features."""
    x, x_test = standardise(train, test)
    weight, bias = softmax_regression(
        x, labels.to(x.device), num_classes=num_classes, l2=l2, max_iterations=max_iterations
    )
    return torch.addmm(bias, x_test, weight).argmax(dim=1)


class LinearProbe(EvaluationProtocol):
    """Accuracy of `linear_probe` as ``linear``.

    Parameters
    ----------
    l2 : float
        Penalty on the weights. 0 is the papers' setting; the small default moves CIFAR-10 by less than 0.2 point and
        gives a solution where classes can be separated without error (digits), for which 0 has none.
    max_iterations : int
        Upper bound for L-BFGS.

    Raises
    ------
    InputError
        ``l2`` is below 0 or ``max_iterations`` below 1.
    """

    def __init__(self, *, l2: float = 1e-4, max_iterations: int = 300) -> None:
        check_solver(l2=l2, max_iterations=max_iterations)
        self.l2, self.max_iterations = l2, max_iterations

    def __call__(self, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Judge the subject; nothing is drawn at random."""
        data = subject.features
        predictions = linear_probe(
            data.train,
            data.train_labels,
            data.test,
            num_classes=data.num_classes,
            l2=self.l2,
            max_iterations=self.max_iterations,
        )
        return {"linear": Score(accuracy(predictions, data.test_labels))}

    def result_units(self, num_classes: int) -> dict[str, str]:
        """Return the unit of ``linear``."""
        return {"linear": ACCURACY}


def check_solver(*, l2: float, max_iterations: int) -> None:
    """Refuse settings of `softmax_regression` that make no sense; raises `InputError`."""
    if not l2 >= 0:
        raise InputError(f"l2={l2} of the linear probe must be at least 0; 0 turns the penalty off")
    if max_iterations < 1:
        raise InputError(f"max_iterations={max_iterations} of the linear probe must be at least 1")
