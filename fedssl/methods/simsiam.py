"""SimSiam (Chen and He, arXiv 2011.10566): predict the projection of one view from the other, without a target network.

A stop-gradient on the predicted projections prevents collapse.
"""

from collections.abc import Callable

from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import negative_cosine
from fedssl.methods.heads import MLP, ProjectorMethod, predictor_for
from fedssl.views import Views


class SimSiam(ProjectorMethod):
    r"""SimSiam with an encoder, a projector and a predictor. Each view has a separate forward pass.

    A batch needs at least three images: batch normalization maps any two images to 1 and -1.

    $$
    D(p, z) = -\frac{1}{n} \sum_{i=1}^{n} \cos(p_i, z_i) \qquad
    \mathcal{L} = \frac{1}{2} D(p^{(1)}, \operatorname{sg}(z^{(2)}))
    + \frac{1}{2} D(p^{(2)}, \operatorname{sg}(z^{(1)}))
    $$

    with $z_i^{(v)}$ and $p_i^{(v)}$ the projection and prediction of view v of image i, and sg the stop-gradient (Eqs.
    1, 3 and 4).

    ``predictor`` builds the predictor from the length of a projection, which must equal the length of its output.
    """

    min_batch_size = 3

    def __init__(self, encoder: Encoder, *, projector: Callable[[int], MLP], predictor: Callable[[int], MLP]) -> None:
        super().__init__(encoder, projector=projector)
        self.predictor = predictor_for(self.projector, predictor)

    def loss(self, views: Views) -> Tensor:
        z1, z2 = self.project(views.images)
        return (negative_cosine(self.predictor(z1), z2) + negative_cosine(self.predictor(z2), z1)) / 2  # Eq. 4
