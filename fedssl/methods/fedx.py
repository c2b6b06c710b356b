"""FedX (Han et al., ECCV 2022, arXiv 2207.09158): contrastive and relational losses, locally and globally.

Locally, projections of the two views attract each other (contrastive term) and have the same similarities to other
images (relational term). Globally, the same two terms relate predictions to the projections of the downloaded model.
The loss is the sum of the four terms.

Differences from the authors' code:

- The relational term is the Jensen-Shannon divergence of the two relations p and q with mean m, ``(KL(p, m) + KL(q, m))
  / 2``. The authors swap the arguments of KL. In both versions the gradient flows into m.
- Relations refer to the other images of the batch, which are random images of the client too. The authors draw a second
  batch, which costs three more forward passes.
- The authors' heads have no batch normalization and their views no color jitter.
"""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.encoders.base import frozen_copy
from fedssl.losses import nt_xent, relational
from fedssl.methods.base import SSLMethod
from fedssl.methods.heads import MLP, ProjectorMethod, predictor_for
from fedssl.views import Views


class FedX(ProjectorMethod):
    r"""FedX with an encoder, a projector, a predictor, and frozen copies of the first two from the start of the round.

    Each view has a separate forward pass. The copy is in eval mode. It is not part of the method: it is neither
    exchanged nor stored, because `start_round` copies the layers with which the client starts the round.

    A batch needs at least three images: batch normalization maps any two images to 1 and -1.

    $$
    \mathcal{L} = C(z^{(1)}, z^{(2)}) + R(z^{(1)}, z^{(2)}; z^{(1)}) + C(p^{(1)}, g^{(2)})
    + R(p^{(1)}, p^{(2)}; g^{(2)})
    $$

    $$
    \rho_{ij}(u) = \frac{\exp(\cos(u_i, a_j) / \tau)}{\sum_{l \ne i} \exp(\cos(u_i, a_l) / \tau)} \qquad
    m_{ij} = \frac{\rho_{ij}(u) + \rho_{ij}(v)}{2}
    $$

    $$
    R(u, v; a) = \frac{1}{2n} \sum_{i=1}^{n} \sum_{j \ne i}
    \left( \rho_{ij}(u) \log \frac{\rho_{ij}(u)}{m_{ij}} + \rho_{ij}(v) \log \frac{\rho_{ij}(v)}{m_{ij}} \right)
    $$

    with C the loss of `fedssl.methods.simclr.SimCLR`, $z^{(v)}$ and $p^{(v)}$ the projections and predictions of view
    v, $g^{(2)}$ the projections of view 2 by the copy, $\tau$ the temperature, and a the anchors.
    """

    min_batch_size = 3

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        predictor: Callable[[int], MLP],
        temperature: float,
    ) -> None:
        super().__init__(encoder, projector=projector)
        self.predictor = predictor_for(self.projector, predictor)
        self.parts_in_eval_mode = ("projector",)
        self.temperature = temperature
        # torch ignores modules in a tuple: they are not in the state_dict and not among the parameters.
        self.received = tuple(frozen_copy(network).eval() for network in (self.encoder, self.projector))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SSLMethod:
        for network in self.received:
            network._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def all_tensors(self) -> Iterator[Tensor]:
        yield from super().all_tensors()
        for network in self.received:
            yield from chain(network.parameters(), network.buffers())

    def start_round(self, *, first: bool) -> None:
        for network, online in zip(self.received, (self.encoder, self.projector), strict=True):
            network.load_state_dict(online.state_dict())

    def loss(self, views: Views) -> Tensor:
        view1, view2 = views.images
        z1, z2 = self.project((view1, view2))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        encoder, projector = self.received
        with torch.no_grad():
            g2 = projector(encoder(view2))
        within = nt_xent(z1, z2, temperature=self.temperature) + relational(z1, z2, z1, temperature=self.temperature)
        across = nt_xent(p1, g2, temperature=self.temperature) + relational(p1, p2, g2, temperature=self.temperature)
        return within + across
