"""Loss-weighted averaging: clients with a small loss count more (Gao et al., ICASSP 2022; "Loss" in L-DAWA).

beta_k = exp(-L_k) / sum_j exp(-L_j), L_k the mean loss of the client's last local epoch. The published client side
sends exp(-L_k) itself, which is 0 for losses of a few hundred; here the loss travels, and weights are relative to the
least loss, so that losses of any size and sign work.
"""

from collections.abc import Sequence
from functools import partial

from fedssl.arrays import Layers
from fedssl.wire.messages import ClientUpdate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.weighted_sum import WeightedSum, weighted_sum


def loss_weighted(global_layers: Layers, updates: Sequence[ClientUpdate]) -> Layers:
    """Mean of the clients' models, weighted by the softmax of minus their training losses.

    Parameters
    ----------
    global_layers : Layers
        The layers the clients started from; they give names, order, shapes and dtypes.
    updates : sequence of ClientUpdate
        One per client, in any order, each with its ``train_loss``.

    Returns
    -------
    Layers
        The new global layers.

    Raises
    ------
    InputError
        No updates, a layer that does not fit, or a ``train_loss`` that is missing or not finite.
    """
    return weighted_sum(global_layers, updates, aggregator=WeightedSum(weighting="loss"))


class LossWeighted(FedSSLStrategy):
    """Averaging weighted by the clients' losses; see `loss_weighted`."""

    def __init__(self) -> None:
        super().__init__(ServerStrategy(partial(WeightedSum, weighting="loss")))
