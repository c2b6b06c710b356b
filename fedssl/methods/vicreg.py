"""VICReg (Bardes et al., ICLR 2022, arXiv 2105.04906): both views are close, features vary and are uncorrelated.

The paper calls the projector "expander": it is wider than the representation, so that the covariance of projections
constrains many products of features. As in the authors' code each view has a separate forward pass.

Differences from the authors' code: batch normalization of a client uses its own batch, because clients train
separately; the authors synchronize it over all GPUs. The learning rate and its schedule are settings of the run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32, vicreg
from fedssl.methods.base import FailureMode
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.views import Views


def projection_rank(z: Tensor) -> float:
    """Return ``tr(C)^2 / tr(C^2)`` of the covariance C of vectors ``(n, dim)``, a number of directions.

    It is k if the vectors vary equally in k directions and not in others; 0 if all vectors are equal.
    """
    centered = z.double() - z.double().mean(dim=0)
    # Covariance and Gram matrix have the same nonzero eigenvalues; the smaller matrix is faster.
    gram = centered.T @ centered if len(z) > z.shape[1] else centered @ centered.T
    squares = gram.square().sum()
    return float(gram.trace().square() / squares) if squares > 0 else 0.0


class VICReg(ProjectorMethod):
    r"""VICReg with an encoder and a projector. Each view has a separate forward pass.

    Encoder and projector are exchanged and aggregated by the strategy; a client keeps nothing between rounds. Variance
    and covariance are those of a client's batches, so that a client with few classes also spreads its own images.

    A batch needs at least three images: batch normalization maps any two images to 1 and -1, and the covariance of two
    images has rank 1.

    $$
    S = \frac{1}{nd} \sum_{i=1}^{n} \lVert z_i^{(1)} - z_i^{(2)} \rVert^2 \qquad
    \Sigma^{(v)} = \frac{1}{n - 1} \sum_{i=1}^{n} (z_i^{(v)} - \bar{z}^{(v)}) (z_i^{(v)} - \bar{z}^{(v)})^\top
    $$

    $$
    V = \frac{1}{2d} \sum_{v=1}^{2} \sum_{a=1}^{d} \max \left( 0, 1 - \sqrt{\Sigma_{aa}^{(v)} + 10^{-4}} \right) \qquad
    C = \frac{1}{d} \sum_{v=1}^{2} \sum_a \sum_{b \ne a} (\Sigma_{ab}^{(v)})^2 \qquad
    \mathcal{L} = \lambda S + \mu V + \nu C
    $$

    with $z_i^{(v)}$ the projection of view v of image i, of d features, and the weights $\lambda$, $\mu$ and $\nu$ of
    invariance, variance and covariance.
    """

    min_batch_size = 3
    failure_modes = (
        FailureMode(
            diagnostic="projection_std",
            minimum=0.1,
            message="all images have nearly the same projection; raise method.var_weight or lower method.sim_weight",
        ),
        FailureMode(
            diagnostic="projection_rank",
            minimum=2.0,
            message="projections vary in few directions; raise method.cov_weight",
        ),
    )

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        sim_weight: float,
        var_weight: float,
        cov_weight: float,
    ) -> None:
        super().__init__(encoder, projector=projector)
        self.sim_weight, self.var_weight, self.cov_weight = sim_weight, var_weight, cov_weight

    def loss(self, views: Views) -> Tensor:
        z1, z2 = self.project(views.images)
        return vicreg(z1, z2, sim_weight=self.sim_weight, var_weight=self.var_weight, cov_weight=self.cov_weight)

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return the mean standard deviation of the projections' features, and `projection_rank`."""
        z = at_least_float32(torch.cat(self.project(views.images)))
        return {"projection_std": z.std(dim=0).mean().item(), "projection_rank": projection_rank(z)}
