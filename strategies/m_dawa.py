"""M-DAWA: each client's model scaled by its cosine with the global model (Rehman et al., ICCV 2023, Eqs. 2-3).

The cosine is that of all weights as one vector; running statistics and counters are left out of it, because counters
of thousands would hide any change of direction. The paper does not say what its vector holds; no code was published.
"""

from collections.abc import Sequence
from functools import partial

from fedssl.arrays import Layers
from fedssl.wire.messages import ClientUpdate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.weighted_sum import WeightedSum, weighted_sum


def m_dawa(global_layers: Layers, updates: Sequence[ClientUpdate], *, buffers: str = "average") -> Layers:
    """Mean over the K updates received of delta_k w_k, delta_k the cosine of the whole model.

    Parameters
    ----------
    global_layers : Layers
        The layers the clients started from, with which they are compared.
    updates : sequence of ClientUpdate
        One per client, in any order; neither ``num_examples`` nor ``train_loss`` is used.
    buffers : {"average", "scale"}
        Running statistics: plain mean, or scaled by delta_k like the weights.

    Returns
    -------
    Layers
        The new global layers.

    Raises
    ------
    InputError
        No updates, an unknown option, a layer that does not fit or has values that are not finite.
    """
    return weighted_sum(global_layers, updates, aggregator=WeightedSum(scale="model", buffers=buffers))  # Eq. 3


class MDAWA(FedSSLStrategy):
    """Model-wise divergence aware weight aggregation; see `m_dawa`. Clients report nothing but their layers."""

    def __init__(self, *, buffers: str = "average") -> None:
        super().__init__(ServerStrategy(partial(WeightedSum, scale="model", buffers=buffers)))
