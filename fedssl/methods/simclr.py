"""SimCLR (Chen et al., arXiv 2002.05709): two views of an image attract, all other images of the batch repel.

L-DAWA trains with it. Its code uses one linear layer as head, a temperature of 0.07, and a loss that differs from Eq. 1
of SimCLR (one direction, self-similarity in the denominator). Here all three are settings, and the default loss is Eq.
1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import nt_xent, nt_xent_one_sided
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.views import Views

LOSSES = {"standard": nt_xent, "l_dawa": nt_xent_one_sided}


class SimCLR(ProjectorMethod):
    r"""SimCLR: an encoder and a projector, trained by NT-Xent.

    $$
    s_{ik} = \frac{\langle z_i, z_k \rangle}{\tau \, \lVert z_i \rVert \, \lVert z_k \rVert} \qquad
    \mathcal{L} = -\frac{1}{2n} \sum_{i=1}^{2n} \log \frac{\exp(s_{i,j(i)})}{\sum_{k \ne i} \exp(s_{ik})} \qquad
    \mathcal{L}_{\text{l\_dawa}} = -\frac{1}{n} \sum_{i=1}^{n} \log \frac{\exp(s_{i,n+i})}{\sum_{k=1}^{2n} \exp(s_{ik})}
    $$

    with $z_i$ the projections of the first views (1 to n) and of the second views (n + 1 to 2n) of a batch, j(i) the
    other view of i, and $\tau$ the temperature.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        temperature: float,
        concat_views: bool = True,
        loss: str = "standard",
    ) -> None:
        super().__init__(encoder, projector=projector)
        self._loss, self.temperature = LOSSES[loss], temperature
        self.concat_views = self.equal_global_sizes = concat_views

    def loss(self, views: Views) -> Tensor:
        if self.concat_views:
            z1, z2 = self.projector(self.encoder(torch.cat(views.images))).chunk(2)
        else:
            z1, z2 = self.project(views.images)
        return self._loss(z1, z2, temperature=self.temperature)
