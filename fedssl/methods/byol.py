"""BYOL (Grill et al., arXiv 2006.07733): predict the target network's projection of one view from the other view.

FedU, FedEMA and FedU2 train with it. BYOL itself increases the decay of the target to 1; see `EMATargetMethod`.
"""

from torch import Tensor

from fedssl.losses import byol
from fedssl.methods.momentum import EMATargetMethod
from fedssl.views import Views


class BYOL(EMATargetMethod):
    r"""BYOL.

    $$
    \mathcal{L} = \frac{1}{n} \sum_{i=1}^{n} \left( 2 - 2 \cos(p_i^{(1)}, \bar{z}_i^{(2)}) \right)
    + \frac{1}{n} \sum_{i=1}^{n} \left( 2 - 2 \cos(p_i^{(2)}, \bar{z}_i^{(1)}) \right)
    $$

    with $p_i^{(v)}$ the prediction of the online network from view v of image i, and $\bar{z}_i^{(v)}$ the projection
    of the target network (`fedssl.methods.momentum.EMATargetMethod`), without gradient. This is Eq. 2 in both
    directions.
    """

    def loss(self, views: Views) -> Tensor:
        p1, p2, z1, z2 = self.forward_views(*views.images)
        return byol(p1, z2, p2, z1)
