"""Weighted k-nearest-neighbor classification of frozen features.

Wu et al. 2018 (Instance Discrimination, arXiv 1805.01978), section 3.4: the k training images with the largest cosine
vote for their class with weight exp(cosine / temperature). EasyFL, FedU2, Dec-SSL and Orchestra use the same rule with
k = 200 and temperature 0.1. EasyFL applies it to the projection, this module to the representation.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.evaluation.features import Features, accuracy
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY, Score

_SIMILARITIES = 2**24  # entries of a block of the similarity matrix: 64 MB


def knn_predict(features: Features, *, k: int, temperature: float) -> Tensor:
    """Predict for each test image the class with the largest vote: int64, ``(n_test,)``.

    Only the directions of features count. ``k`` neighbors vote, or all training images if there are fewer. A large
    ``temperature`` gives all neighbors the same weight; it is above 0.
    """
    train = features.train
    bank = F.normalize(train, dim=1).T
    labels = features.train_labels.to(train.device)
    k = min(k, len(train))
    predictions = []
    for queries in F.normalize(features.test, dim=1).split(max(1, _SIMILARITIES // len(train))):
        cosine, neighbors = (queries @ bank).topk(k, sorted=False)
        # A common factor does not change the vote; without it a small temperature overflows.
        weight = ((cosine - cosine.amax(dim=1, keepdim=True)) / temperature).exp()
        votes = weight.new_zeros(len(queries), features.num_classes).scatter_add_(1, labels[neighbors], weight)
        predictions.append(votes.argmax(dim=1))
    return torch.cat(predictions)


@dataclass(kw_only=True, eq=False)
class KNN(EvaluationProtocol):
    r"""Accuracy of `knn_predict` as ``knn``.

    $$
    w_c = \sum_{j \in N_k, \, y_j = c} \exp(\cos(h_j, h^*) / \tau)
    \qquad \hat{y} = \underset{c}{\operatorname{argmax}} \; w_c
    $$

    with $h^*$ the representation of a test image, and $h_j$, $y_j$ those of its k nearest training images and their
    classes.
    """

    k: int = 200
    temperature: float = 0.1

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        features = evaluation_input.features
        predictions = knn_predict(features, k=self.k, temperature=self.temperature)
        return {"knn": Score(accuracy(predictions, features.test_labels))}

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"knn": ACCURACY}
