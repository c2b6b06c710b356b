"""Aggregation of LoRA's products: the mean of factors is not the factor of the mean.

A linear strategy gives the new product P' = c_0 P + sum_k c_k P_k, with P = s B A from which the clients started and
P_k = s B_k A_k (`strategies.interfaces.LinearAggregator`). Its own layers B' and A' are the same combinations of the
factors, and s B' A' differs from P' by terms such as B_1 A_2. ``tuning.aggregation`` selects what becomes of P':

- ``factors`` (FedIT, Zhang et al., arXiv 2305.05644): B' and A', the product is approximate;
- ``freeze_a`` (FFA-LoRA, Sun et al., arXiv 2403.12313): nobody trains A, so that s B' A = P';
- ``exact`` (FedEx-LoRA, Singhal et al., arXiv 2410.09432): B' and A', and the weight becomes W + P' - s B' A';
- ``stack`` (FLoRA, Wang et al., arXiv 2409.05976): the weight becomes W + P', and clients start from B = 0;
- ``svd`` (FlexLoRA, Bai et al., arXiv 2402.11505): the factors of the nearest product of rank r.

P' is never formed: its factors are those of all clients side by side (`fedssl.low_rank_products.stack`).
"""

from collections.abc import Mapping

import numpy as np

from fedssl.low_rank_products import LowRank, stack
from strategies.interfaces import Combination


def combine(combination: Combination, initial: LowRank, products: Mapping[int, LowRank]) -> LowRank:
    """Return P' from the initial product and those of the clients, by client id. Its rank is the sum of theirs."""
    terms = [(combination.initial, initial)]
    terms += [(combination.clients.get(client, 0.0), product) for client, product in products.items()]
    used = [(coefficient, product) for coefficient, product in terms if coefficient] or [(0.0, initial)]
    return stack(*zip(*used, strict=True))


def exact_weight(weight: np.ndarray, product: LowRank, factors: LowRank) -> np.ndarray:
    """Return W + P' - s B' A' (FedEx-LoRA): with the new factors it is the aggregated weight."""
    return stacked_weight(weight, product.minus(factors))


def stacked_weight(weight: np.ndarray, product: LowRank) -> np.ndarray:
    """Return W + P' (FLoRA), in the shape and dtype of the weight. It is computed in float64."""
    return np.asarray((weight + product.dense().reshape(weight.shape)).astype(weight.dtype))
