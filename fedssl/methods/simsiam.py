"""SimSiam (Chen and He, arXiv 2011.10566): predict, from one view, the projection of the other; there is no target.

What keeps it from collapsing is that no gradient flows into the projections that are predicted.
"""

from collections.abc import Callable

from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import negative_cosine
from fedssl.methods.base import SSLMethod
from fedssl.methods.heads import MLP
from fedssl.methods.momentum import predictor_for


class SimSiam(SSLMethod):
    """An encoder, a projector and a predictor; every view has a forward pass of its own.

    A batch has three images at least: batch normalization makes 1 and -1 of two images, whatever they are.

    Parameters
    ----------
    encoder : Encoder
        Trained in place.
    projector : callable
        Makes the projector from the length of a representation, e.g. ``partial(MLP, hidden=512, out=512, layers=3)``.
    predictor : callable
        Makes the predictor from the length of a projection, which must be the length of its own output too.

    Raises
    ------
    InputError
        If the predictor's output does not fit.
    """

    min_batch_size = 3

    def __init__(self, encoder: Encoder, *, projector: Callable[[int], MLP], predictor: Callable[[int], MLP]) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder.feature_dim)
        self.predictor = predictor_for(self.projector, predictor)

    def loss(self, view1: Tensor, view2: Tensor) -> Tensor:
        z1, z2 = (self.projector(self.encoder(view)) for view in (view1, view2))
        return (negative_cosine(self.predictor(z1), z2) + negative_cosine(self.predictor(z2), z1)) / 2  # Eq. 4
