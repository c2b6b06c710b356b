"""BYOL (Grill et al., arXiv 2006.07733): predict, from one view, what a slowly moving copy says of the other.

FedU, FedEMA and FedU2 train with it. BYOL itself lets the decay of the target grow to 1; see `EMAPredictorMethod`.
"""

from torch import Tensor

from fedssl.losses import byol
from fedssl.methods.momentum import EMAPredictorMethod


class BYOL(EMAPredictorMethod):
    """BYOL; parameters as in `EMAPredictorMethod`."""

    def loss(self, view1: Tensor, view2: Tensor) -> Tensor:
        p1, p2, z1, z2 = self.forward_views(view1, view2)
        return byol(p1, z2, p2, z1)
