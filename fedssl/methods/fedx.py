"""FedX (Han et al., ECCV 2022, arXiv 2207.09158): clients learn from their own two views and from the received model.

Locally, projections of the two views attract (contrastive term) and agree on how similar the other images are
(relational term). Globally, predictions are contrasted with what the received model projects, and agree on how similar
the received model's projections of the other images are. The four terms are added.

Where this differs from the authors' code:

- the relational term is the Jensen-Shannon divergence of the two relations p and q with their mean m,
  ``(KL(p, m) + KL(q, m)) / 2``; theirs has the arguments of KL the other way round. In both the gradient flows into m;
- the images that relations are about are the others of the batch, which are random images of the client as well;
  theirs are a second batch drawn beside it, which costs three more forward passes;
- their heads have no batch normalization and their views no change of color.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.losses import nt_xent, relational
from fedssl.methods.base import SSLMethod
from fedssl.methods.heads import MLP
from fedssl.methods.momentum import predictor_for


class FedX(SSLMethod):
    """An encoder, a projector and a predictor, and a frozen copy of the first two as the round found them.

    Every view has a forward pass of its own. The copy is in eval mode. It is no part of the method: it neither travels
    nor stays with the client, because `start_round` makes it anew from the global layers (from what the client starts
    the round with, if its strategy mixes them with its own).

    A batch has three images at least: batch normalization makes 1 and -1 of two images, whatever they are.

    Parameters
    ----------
    encoder : Encoder
        Trained in place.
    projector : callable
        Makes the projector from the length of a representation, e.g. ``partial(MLP, hidden=512, out=256)``.
    predictor : callable
        Makes the predictor from the length of a projection, which must be the length of its own output too.
    temperature : float
        Of all four terms; positive.

    Raises
    ------
    InputError
        If ``temperature`` is not positive, or the predictor's output does not fit.
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
        if temperature <= 0:
            raise InputError(f"method.temperature={temperature} must be positive; FedX uses 0.1")
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder.feature_dim)
        self.predictor = predictor_for(self.projector, predictor)
        self.temperature = temperature
        # In a tuple torch does not see them: they are in no state_dict and among no parameters.
        self.received = tuple(
            copy.deepcopy(network).requires_grad_(False).eval() for network in (self.encoder, self.projector)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SSLMethod:
        for network in self.received:
            network._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def start_round(self, *, first: bool) -> None:
        for network, online in zip(self.received, (self.encoder, self.projector), strict=True):
            network.load_state_dict(online.state_dict())

    def loss(self, view1: Tensor, view2: Tensor) -> Tensor:
        z1, z2 = (self.projector(self.encoder(view)) for view in (view1, view2))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        encoder, projector = self.received
        with torch.no_grad():
            g2 = projector(encoder(view2))
        within = nt_xent(z1, z2, temperature=self.temperature) + relational(z1, z2, z1, temperature=self.temperature)
        across = nt_xent(p1, g2, temperature=self.temperature) + relational(p1, p2, g2, temperature=self.temperature)
        return within + across
