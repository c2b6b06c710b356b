"""Loss-weighted averaging: clients with a small loss have a large weight (Gao et al., ICASSP 2022; "Loss" in L-DAWA).

The published client side sends exp(-L_k), which is 0 for losses of a few hundred. Here the client sends the loss, and
weights are relative to the smallest loss, which works for losses of any size and sign.
"""

from collections.abc import Sequence
from functools import partial

from fedssl.arrays import GlobalLayers, Layers
from fedssl.wire.messages import ClientUpdate
from strategies.aggregate import aggregate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.weighted_sum import WeightedSum


def loss_weighted(global_layers: Layers | GlobalLayers, updates: Sequence[ClientUpdate]) -> Layers:
    """Return the mean of the clients' models, weighted by the softmax of minus their training losses.

    ``global_layers`` and ``updates`` as in `strategies.fedavg.fedavg`; each update has a ``train_loss``.
    """
    return aggregate(global_layers, updates, WeightedSum(weighting="loss"), needs_cosines=False)


class LossWeighted(FedSSLStrategy):
    r"""Averaging weighted by the clients' losses. See `loss_weighted`.

    $$
    w = \sum_k \beta_k w_k \qquad \beta_k = \frac{\exp(-\mathcal{L}_k)}{\sum_j \exp(-\mathcal{L}_j)}
    $$

    with $\mathcal{L}_k$ the mean loss of the client's last local epoch, regularizer included.
    """

    def __init__(self) -> None:
        super().__init__(ServerStrategy(partial(WeightedSum, weighting="loss")))
