"""Retrieval: images of the query's class, ranked by the cosine of frozen features.

Every test image is a query. Its gallery is the other test images, as in metric learning (Oh Song et al. 2016, arXiv
1511.06452), or the training images. Queries without an image of their class in the gallery have no result and do not
count, as in pytorch-metric-learning.

Average precision is that of ``sklearn.metrics.average_precision_score``: gallery images with equal cosines share the
last of their ranks. ``recall_at_k``, as in metric learning, is the share of queries with an image of their class among
the k first, not the share of the class that is found; of equal cosines, those of other classes rank first. Results do
not depend on the order of the gallery, and they are low if all features are equal.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.scores import FRACTION, Score
from fedssl.logs import log_once

_SIMILARITIES = 2**23  # entries of a block of the similarity matrix: 32 MB, and its sorted copy


def rank_classes(
    queries: Tensor, labels: Tensor, gallery: Tensor, gallery_labels: Tensor, *, same: bool
) -> tuple[Tensor, Tensor]:
    """Return average precision and rank, from 1, of the first image of its class for each query with such an image.

    Features are float32 ``(m, dim)`` and ``(n, dim)`` on the CPU. ``same`` means that the gallery is the queries, from
    which each query is excluded. Both results are float64, ``(used,)``, in the order of classes.
    """
    q, bank = F.normalize(queries, dim=1), F.normalize(gallery, dim=1).T
    precisions, ranks = [queries.new_zeros(0, dtype=torch.float64)], [queries.new_zeros(0, dtype=torch.float64)]
    for name in labels.unique():
        relevant = (gallery_labels == name).nonzero().flatten()
        if len(relevant) <= same:
            continue
        for rows in (labels == name).nonzero().flatten().split(max(1, _SIMILARITIES // len(gallery))):
            cosine = q[rows] @ bank
            if same:
                cosine[torch.arange(len(rows)), rows] = -torch.inf
            every, own = _sorted(cosine), _sorted(cosine[:, relevant])  # ascending; the query itself is the first
            values = own[:, int(same) :].contiguous()
            found = own.shape[1] - torch.searchsorted(own, values)  # own images that rank as high or higher
            above = every.shape[1] - torch.searchsorted(every, values)  # all of them
            precisions.append((found / above.double()).mean(dim=1))
            ranks.append((above - found)[:, -1].double() + 1)
    return torch.cat(precisions), torch.cat(ranks)


def _sorted(values: Tensor) -> Tensor:
    """Sort rows; NumPy takes a tenth of torch's time, which returns indices too."""
    return torch.from_numpy(np.sort(values.numpy(), axis=1))


@dataclass(kw_only=True, eq=False)
class Retrieval(EvaluationProtocol):
    r"""Mean average precision as ``retrieval_map``, and ``recall_at_<k>``.

    $$
    \text{AP}_q = \frac{1}{|R_q|} \sum_{j \in R_q} \frac{|\{i \in R_q : s_{qi} \ge s_{qj}\}|}{|\{i : s_{qi} \ge
    s_{qj}\}|} \qquad \text{recall}_k = \frac{1}{|Q|} \left| \{ q : \text{an image of } R_q \text{ is among the first }
    k \} \right|
    $$

    with $s_{qi}$ the cosine of query q and gallery image i, and $R_q$ the gallery images of the query's class.
    """

    predicts_classes = False

    gallery: str = "test"
    recall_at: Sequence[int] = (1, 5, 10)

    @property
    def _candidate(self) -> str:
        return "other test image" if self.gallery == "test" else "training image"

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        without = int((~self._has_match(evaluation_input)).sum())
        labels = evaluation_input.test.labels
        if without == len(labels):
            return {}
        if without:
            images = f"{without} of {len(labels)} test images"
            log_once(
                logging.WARNING, f"{images} are no queries of retrieval, because no {self._candidate} has their class"
            )
        features, same = evaluation_input.features, self.gallery == "test"
        queries = features.test
        gallery, known = (queries, labels) if same else (features.train, features.train_labels)
        precision, rank = rank_classes(queries, labels, gallery, known, same=same)
        shares = {"retrieval_map": precision, **{f"recall_at_{k}": (rank <= k).double() for k in self.recall_at}}
        return {name: Score(share.mean().item(), FRACTION, num_images=len(share)) for name, share in shares.items()}

    def result_units(self, num_classes: int) -> dict[str, str]:
        return dict.fromkeys(["retrieval_map", *(f"recall_at_{k}" for k in self.recall_at)], FRACTION)

    def left_out(self, evaluation_input: EvaluationInput) -> dict[str, str]:
        """Return all results if no query has an image of its class in the gallery."""
        has_match = self._has_match(evaluation_input)
        reason = f"no {self._candidate} has the class of a test image"
        return {} if has_match.any() else dict.fromkeys(self.result_units(0), reason)

    def _has_match(self, evaluation_input: EvaluationInput) -> Tensor:
        """Return for each test image whether the gallery has an image of its class."""
        labels, train = evaluation_input.test.labels, evaluation_input.train.labels
        if self.gallery == "train":
            return torch.isin(labels, train)
        _, numbers, counts = labels.unique(return_inverse=True, return_counts=True)
        is_repeated: Tensor = counts[numbers] > 1
        return is_repeated
