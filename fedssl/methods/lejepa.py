"""LeJEPA (Balestriero and LeCun, arXiv 2511.08544): views predict the mean of the global views, under SIGReg.

The projections of all views are close to the mean of the global views' projections. SIGReg prevents collapse: it keeps
the projections of each view close to an isotropic Gaussian, see `fedssl.losses.sigreg`. There is no target network, no
predictor and no stop-gradient.

In a federation the directions on which SIGReg tests the projections are common to all clients: step i of a round uses
the same directions on every client, so that the clients' updates pull the same marginals of the projections towards the
standard normal distribution.

Differences from the paper:

- ``method.t_max`` and ``method.num_points`` are those of the integral over [0, t_max], see `fedssl.losses.sigreg`. The
  paper integrates over [-5, 5] with 17 points; the authors' minimal example over [0, 3] with 17 points.
- The minimal example has views of one size only and predicts the mean of all. Here the mean is that of the global
  views, as in the paper.
- Directions are drawn on the CPU from the seed of the run; in the authors' code from a global step number.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32, sigreg
from fedssl.methods.base import FailureMode
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.seeding import torch_generator
from fedssl.views import AcceptedViews, Views, by_size


def prediction(z: Tensor, *, num_global: int) -> Tensor:
    """Return the mean squared difference of all views' projections and the mean of the global views' projections.

    ``z`` are the projections of the global views, which are the first ``num_global``, and of the local views, ``(views,
    batch, dim)``. The mean is over views, images and features. The gradient flows into all, also through the mean.
    """
    return (z - z[:num_global].mean(dim=0)).square().mean()


class LeJEPA(ProjectorMethod):
    r"""LeJEPA with an encoder and a projector.

    Views of one size are concatenated into one forward pass, so that batch normalization of encoder and projector uses
    the statistics of all global views, and those of all local views, as in the paper.

    Encoder and projector are exchanged and aggregated by the strategy; a client keeps nothing between rounds.

    A batch needs at least three images: batch normalization of a single local view maps any two images to 1 and -1.

    $$
    P = \frac{1}{Vnd} \sum_{v=1}^{V} \sum_{i=1}^{n} \left\lVert z_i^{(v)} - \frac{1}{G}
    \sum_{u=1}^{G} z_i^{(u)} \right\rVert^2 \qquad
    \varphi_m^{(v)}(t) = \frac{1}{n} \sum_{i=1}^{n} e^{\mathrm{i} t \langle a_m, z_i^{(v)} \rangle}
    $$

    $$
    R = \frac{1}{VM} \sum_{v=1}^{V} \sum_{m=1}^{M} n \int_{-T}^{T}
    \left| \varphi_m^{(v)}(t) - e^{-t^2/2} \right|^2 e^{-t^2/2} \, dt \qquad
    \mathcal{L} = (1 - \lambda) P + \lambda R
    $$

    with $z_i^{(v)}$ the projection of view v of image i, of d features, G of the V views global, $a_m$ the M random
    unit vectors (``num_slices``), T the ``t_max``, and $\lambda$ the ``lambd``.
    """

    min_batch_size = 3
    accepted_views = AcceptedViews(min_global=2, max_global=None, local=True, augmentation="multi_crop")
    cuda_graph_safe = False  # each step draws its directions on the CPU
    failure_modes = (
        FailureMode(
            diagnostic="projection_std",
            minimum=0.1,
            message="all images have nearly the same projection; raise method.lambd",
        ),
        FailureMode(
            diagnostic="sigreg_per_image",
            maximum=0.45,
            message="projections are farther from a standard normal distribution than equal ones; raise method.lambd "
            "or lower optimizer.lr",
        ),
    )

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        lambd: float,
        num_slices: int,
        num_points: int,
        t_max: float,
    ) -> None:
        super().__init__(encoder, projector=projector)
        self.lambd, self.num_slices, self.num_points, self.t_max = lambd, num_slices, num_points, t_max
        self._directions = self._new_directions()

    def start_round(self, *, first: bool) -> None:
        self._directions = self._new_directions()

    def _new_directions(self) -> torch.Generator:
        return torch_generator(self.seed, "directions", self.round)  # the same for all clients

    def loss(self, views: Views) -> Tensor:
        z = self.project_all(views)
        distance = prediction(z, num_global=len(views.global_images))
        return (1 - self.lambd) * distance + self.lambd * self.gaussianity(z, self._directions)

    def project_all(self, views: Views) -> Tensor:
        """Return projections of all views, ``(views, batch, dim)``, in at least float32."""
        z = torch.cat(self.project(by_size(views.images)))
        return at_least_float32(z).view(len(views), views.num_images, -1)

    def gaussianity(self, z: Tensor, directions: torch.Generator) -> Tensor:
        """Return SIGReg of projections ``(views, batch, dim)`` on new directions, the mean over views."""
        return sigreg(z, slices=self.num_slices, generator=directions, num_points=self.num_points, t_max=self.t_max)

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return the mean standard deviation of the projections' features, and SIGReg divided by the images.

        Divided by the number of images SIGReg depends little on it: it is near 0 for a standard normal distribution,
        0.41 if all projections are 0, and 1.1 if they are very far from each other.
        """
        z = self.project_all(views)
        statistic = self.gaussianity(z, torch_generator(self.seed, "diagnosed directions"))
        return {
            "projection_std": z.std(dim=1).mean().item(),
            "sigreg_per_image": statistic.item() / views.num_images,
        }
