"""M-DAWA: each client's model scaled by its cosine with the global model (Rehman et al., ICCV 2023, Eqs. 2-3).

The cosine is that of all weights as one vector, without running statistics and counters, because counters of thousands
would hide any change of direction. The paper does not define its vector, and there is no published code.
"""

from collections.abc import Sequence
from functools import partial

from fedssl.arrays import GlobalLayers, Layers
from fedssl.wire.messages import ClientUpdate
from strategies.aggregate import aggregate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.weighted_sum import WeightedSum


def m_dawa(
    global_layers: Layers | GlobalLayers, updates: Sequence[ClientUpdate], *, buffers: str = "average"
) -> Layers:
    """Return the mean over the K received updates of delta_k w_k, where delta_k is the cosine of the whole model.

    ``global_layers`` and ``updates`` as in `strategies.fedavg.fedavg`, without metrics. ``buffers`` are running
    statistics: "average" is their plain mean, "scale" multiplies them by delta_k like the weights.
    """
    return aggregate(global_layers, updates, WeightedSum(scale="model", buffers=buffers))  # Eq. 3


class MDAWA(FedSSLStrategy):
    r"""Model-wise divergence aware weight aggregation. See `m_dawa`. Clients report no metrics.

    $$
    \delta_k = \frac{\langle w_g, w_k \rangle}{\lVert w_g \rVert \, \lVert w_k \rVert} \qquad
    w = \frac{1}{K} \sum_k \delta_k \, w_k
    $$

    with $w_g$ all weights of the global model as one vector, and $w_k$ the same after the training of client k.
    """

    def __init__(self, *, buffers: str = "average") -> None:
        super().__init__(ServerStrategy(partial(WeightedSum, scale="model", buffers=buffers)))
