"""Weighted k-nearest-neighbour classification of frozen features.

Wu et al. 2018 (Instance Discrimination, arXiv 1805.01978), section 3.4: the k training images with the largest cosine
vote for their class with weight exp(cosine / temperature). EasyFL, FedU2, Dec-SSL and Orchestra use the same rule with
k = 200 and temperature 0.1; EasyFL applies it to the projection, here it is always the representation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError
from fedssl.evaluation.evaluation_input import EvaluationInput
from fedssl.evaluation.features import accuracy
from fedssl.evaluation.protocol import EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY, Score

_SIMILARITIES = 2**24  # numbers in a block of the similarity matrix: 64 MB


def knn_predict(
    train: Tensor, labels: Tensor, test: Tensor, *, num_classes: int, k: int = 200, temperature: float = 0.1
) -> Tensor:
    """Predict for each test image the class with the largest vote.

    Parameters
    ----------
    train, test : Tensor
        Features ``(n_train, dim)`` and ``(n_test, dim)``; of any length, only their directions count.
    labels : Tensor
        Classes of the training images, int64 ``(n_train,)``.
    num_classes : int
    k : int
        Neighbours that vote; all training images if there are fewer.
    temperature : float
        Above 0; a large one gives every neighbour the same weight.

    Returns
    -------
    Tensor
        int64, ``(n_test,)``.
    """
    bank = F.normalize(train, dim=1).T
    labels = labels.to(train.device)
    k = min(k, len(train))
    predictions = []
    for queries in F.normalize(test, dim=1).split(max(1, _SIMILARITIES // len(train))):
        cosine, neighbours = (queries @ bank).topk(k, sorted=False)
        # A common factor changes no vote; without it a small temperature overflows.
        weight = ((cosine - cosine.amax(dim=1, keepdim=True)) / temperature).exp()
        votes = weight.new_zeros(len(queries), num_classes).scatter_add_(1, labels[neighbours], weight)
        predictions.append(votes.argmax(dim=1))
    return torch.cat(predictions)


class KNN(EvaluationProtocol):
    """Accuracy of `knn_predict` as ``knn``.

    Raises
    ------
    InputError
        ``k`` is below 1, or ``temperature`` is not above 0.
    """

    def __init__(self, *, k: int = 200, temperature: float = 0.1) -> None:
        if k < 1:
            raise InputError(f"k={k} of the kNN evaluation must be at least 1 neighbour; the papers use 200")
        if not temperature > 0:
            raise InputError(f"temperature={temperature} of the kNN evaluation must be above 0; the papers use 0.1")
        self.k, self.temperature = k, temperature

    def __call__(self, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Judge the subject; nothing is drawn at random."""
        data = subject.features
        predictions = knn_predict(
            data.train,
            data.train_labels,
            data.test,
            num_classes=data.num_classes,
            k=self.k,
            temperature=self.temperature,
        )
        return {"knn": Score(accuracy(predictions, data.test_labels))}

    def result_units(self, num_classes: int) -> dict[str, str]:
        """Return the unit of ``knn``."""
        return {"knn": ACCURACY}
