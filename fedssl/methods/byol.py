"""BYOL (Grill et al., arXiv 2006.07733): predict the target network's projection of one view from the other view.

FedU, FedEMA and FedU2 train with it. BYOL itself increases the decay of the target to 1; see `EMAPredictorMethod`.
"""

from torch import Tensor

from fedssl.losses import byol
from fedssl.methods.momentum import EMAPredictorMethod
from fedssl.views import Views


class BYOL(EMAPredictorMethod):
    """BYOL; parameters as in `EMAPredictorMethod`."""

    def loss(self, views: Views) -> Tensor:
        p1, p2, z1, z2 = self.forward_views(*views.images)
        return byol(p1, z2, p2, z1)
