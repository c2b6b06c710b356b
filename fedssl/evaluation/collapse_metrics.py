"""Measures of representation collapse, which need images but no labels.

`dimension_std` measures constant collapse (all images at one point). `spectrum`, its summary `covariance_rank`, and
`effective_rank` measure dimensional collapse (images in few dimensions). `alignment` and `uniformity` are the two
objectives of contrastive learning. All use representations h of the same images ``(n, dim)``. `effective_rank`
(RankMe), `alpha_req` and `lidar` are from papers that select encoders by them, without labels.

FedU2's Fig. 3 shows the spectrum of test images and that of Gaussian vectors. It needs more images than the other
measures: with n images at most n - 1 singular values are above 0.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.datasets.images import ImageSource, TensorImages
from fedssl.evaluation.features import eval_mode, extract
from fedssl.machine.out_of_memory import module_on_cpu, retry_in_chunks
from fedssl.seeding import torch_generator
from fedssl.training import Augment

TOP = 100  # number of recorded singular values, as in FedU2
_RANKS = (4, 100)  # first and last eigenvalue of the fit of `alpha_req`, from 1
_DELTA = 1e-4  # of `lidar`, as in the paper


def spectrum(h: Tensor) -> Tensor:
    """Return the covariance's singular values (divisor n, float64, descending), ``(min(n, dim),)``; FedU2, Fig. 3."""
    centered = h.double() - h.double().mean(dim=0)
    # Covariance and Gram matrix have the same nonzero values; the smaller matrix is faster.
    gram = centered.T @ centered if h.shape[0] > h.shape[1] else centered @ centered.T
    values: Tensor = torch.linalg.eigvalsh(gram / len(h))
    return values.flip(0).clamp(min=0)


def gaussian_spectrum(n: int, dim: int) -> Tensor:
    """Return the `spectrum` of n fixed normalized Gaussian vectors, which have no collapse: values around 1 / dim."""
    vectors = torch.randn(n, dim, generator=torch_generator(0, "Gaussian spectrum"), dtype=torch.float64)
    return spectrum(F.normalize(vectors, dim=1))


def effective_rank(h: Tensor) -> float:
    """Return RankMe (Garrido et al., ICML 2023, Eq. 1): exp of the entropy of the singular values' shares.

    Not centered. Between 1 (one direction) and min(n, dim) (all directions equal); 0 for representations of zeros.
    """
    return _rank(torch.linalg.svdvals(h.double()))


def covariance_rank(h: Tensor) -> float:
    """Count the directions of variation: exp of the entropy of the shares of the covariance's singular values.

    1 if all images are on one line, 0 if at one point. Directions are weighted by variance, so that small deviations
    count less than in `effective_rank`.
    """
    return _rank(spectrum(h))


def alpha_req(h: Tensor) -> float:
    """Return alpha-ReQ (Agrawal et al., NeurIPS 2022): alpha of the covariance's eigenvalues ~ rank ** -alpha.

    Near 1 is best, says the paper. As in the authors' code, the line through log eigenvalues and log ranks has the
    weights 1 / rank, and the ranks are `_RANKS`; eigenvalues that are 0 up to rounding are left out. 0 for fewer than
    two.
    """
    values = spectrum(h)
    kept = values[: int((values > values[0] * len(values) * torch.finfo(values.dtype).eps).sum())]
    ranks = torch.arange(1, len(kept) + 1, dtype=torch.float64)
    first, last = _RANKS if len(kept) > 2 * _RANKS[0] else (1, len(kept))
    x, y, w = (part[first - 1 : last] for part in (ranks.log(), kept.log(), 1 / ranks))
    if len(x) < 2:
        return 0.0
    x, y = x - (w @ x) / w.sum(), y - (w @ y) / w.sum()
    return float(-(w * x @ y) / (w * x @ x))


def lidar(views: Sequence[Tensor]) -> float:
    """Return LiDAR (Thilak et al., ICLR 2024): exp of the entropy of an LDA whose classes are the images.

    ``views`` are the representations of views of the same images, each ``(n, dim)``. Between 1 and min(n - 1, dim); 0
    if all images have the same mean. The paper has 50 views of 1,000 images.
    """
    h = torch.stack(list(views)).double()  # (q, n, dim)
    means = h.mean(dim=0)
    within, between = (h - means).flatten(0, 1), means - means.mean(dim=0)
    sigma_w = within.T @ within / len(within) + _DELTA * torch.eye(h.shape[2], dtype=torch.float64)
    # The eigenvalues of Sigma_w^-1/2 Sigma_b Sigma_w^-1/2 are the squares of these singular values.
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(sigma_w), between.T, upper=False)
    return _rank(torch.linalg.svdvals(whitened).square() / len(between))


def _rank(values: Tensor) -> float:
    if not values.sum():
        return 0.0
    shares = values / values.sum()
    return math.exp(-torch.special.xlogy(shares, shares).sum().item())


def dimension_std(h: Tensor) -> float:
    """Return the mean standard deviation per dimension of h / ||h||, times sqrt(dim): 0 collapsed, about 1 uniform."""
    return float(F.normalize(h.double(), dim=1).std(dim=0, correction=0).mean() * math.sqrt(h.shape[1]))


def alignment(h1: Tensor, h2: Tensor) -> float:
    """Return the mean squared distance of two views on the sphere, 0 to 4 (Wang and Isola, ICML 2020, alpha = 2)."""
    return float((F.normalize(h1.double(), dim=1) - F.normalize(h2.double(), dim=1)).square().sum(dim=1).mean())


def uniformity(h: Tensor) -> float:
    """Return the log of the mean of exp(-2 d^2) over image pairs, -8 to 0 (Wang and Isola, t = 2); 0 collapsed."""
    squares = torch.pdist(F.normalize(h.double(), dim=1)).square()
    return float(torch.logsumexp(-2 * squares, dim=0) - math.log(len(squares)))


class CollapseMetrics:
    """The measures above for several encoders, on the same images and views.

    ``images`` are those of the data set, of which ``num_images``, at least 2,
    are used. ``augment`` makes the views for `alignment`. ``mean`` and ``std`` are per channel.
    """

    def __init__(
        self,
        images: ImageSource,
        *,
        num_images: int,
        augment: Augment,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        seed: int,
    ) -> None:
        generator = torch_generator(seed, "health")
        sample = images[torch.randperm(len(images), generator=generator)[:num_images]]
        self._images = TensorImages(sample)
        self._mean, self._std, self._device = mean, std, device
        start = generator.get_state()

        def views(used: torch.device, _: int) -> list[Tensor]:
            generator.set_state(start)
            images = augment(sample.to(used), generator).global_images
            if len(images) < 2:
                images += augment(sample.to(used), generator).global_images
            return images[:2]

        self._views = retry_in_chunks(views, device=device, what="views are computed")

    def measure(self, encoder: nn.Module) -> dict[str, float]:
        """Return the measures above by name, without the spectrum."""
        h = extract(encoder, self._images, mean=self._mean, std=self._std, device=self._device)

        def both(used: torch.device, chunk: int) -> Tensor:
            network = encoder if used == self._device else module_on_cpu(encoder)
            batches = [batch for view in self._views for batch in view.split(chunk)]
            with eval_mode(network):
                return torch.cat([network(batch.to(used)).float() for batch in batches]).cpu()

        h1, h2 = retry_in_chunks(
            both, device=self._device, chunk=len(self._images), what="representations of views are computed"
        ).chunk(2)
        return {
            "effective_rank": effective_rank(h),
            "covariance_rank": covariance_rank(h),
            "spread": dimension_std(h),
            "alignment": alignment(h1, h2),
            "uniformity": uniformity(h),
            "alpha_req": alpha_req(h),
            "lidar": lidar((h1, h2)),
        }
