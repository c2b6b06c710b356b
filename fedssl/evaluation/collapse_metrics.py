"""Whether a representation collapses: numbers that need images but no labels.

Constant collapse (all images on one point) shows in `dimension_std`, dimensional collapse (images in few dimensions) in
the `spectrum`, which `covariance_rank` sums up, and in `effective_rank`; `alignment` and `uniformity` are the two sides
between which contrastive learning balances. All take representations h of the same images ``(n, dim)``.

FedU2's Fig. 3 shows the spectrum of test images beside that of Gaussian vectors. It needs more images than the
numbers do: with n of them no more than n - 1 singular values are above 0, whatever the encoder.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.evaluation.features import extract
from fedssl.seeding import torch_generator
from fedssl.training import Augment

TOP = 100  # singular values that are recorded (FedU2 shows as many)


def spectrum(h: Tensor) -> Tensor:
    """Singular values of the covariance (divisor n) in float64, descending, ``(min(n, dim),)``; FedU2, Fig. 3."""
    centred = h.double() - h.double().mean(dim=0)
    # Those of the covariance and of the matrix of inner products are the same; the smaller one is the faster.
    gram = centred.T @ centred if h.shape[0] > h.shape[1] else centred @ centred.T
    values: Tensor = torch.linalg.eigvalsh(gram / len(h))
    return values.flip(0).clamp(min=0)


def gaussian_spectrum(n: int, dim: int) -> Tensor:
    """The `spectrum` of n Gaussian vectors, each divided by its length, always the same ones: no collapse at all.

    Its values lie around 1 / dim, the further apart the fewer vectors there are.
    """
    vectors = torch.randn(n, dim, generator=torch_generator(0, "Gaussian spectrum"), dtype=torch.float64)
    return spectrum(F.normalize(vectors, dim=1))


def effective_rank(h: Tensor) -> float:
    """RankMe (Garrido et al., ICML 2023, Eq. 1): exp of the entropy of the singular values' shares, not centred.

    Between 1 (one direction) and min(n, dim) (all directions alike); 0 for representations of zeros.
    """
    return _rank(torch.linalg.svdvals(h.double()))


def covariance_rank(h: Tensor) -> float:
    """Count directions in which images vary: exp of the entropy of the shares of the covariance's singular values.

    1 if all images lie on one line, 0 if on one point. A direction counts by its variance, so small deviations from
    the line count less than in `effective_rank`.
    """
    return _rank(spectrum(h))


def _rank(values: Tensor) -> float:
    if not values.sum():
        return 0.0
    shares = values / values.sum()
    return math.exp(-torch.special.xlogy(shares, shares).sum().item())


def dimension_std(h: Tensor) -> float:
    """Measure the deviation per dimension of h / ||h||, times sqrt(dim): 0 collapsed, about 1 on the whole sphere."""
    return float(F.normalize(h.double(), dim=1).std(dim=0, correction=0).mean() * math.sqrt(h.shape[1]))


def alignment(h1: Tensor, h2: Tensor) -> float:
    """Mean squared distance of two views' normalised representations, 0 to 4 (Wang and Isola, ICML 2020, alpha = 2)."""
    return float((F.normalize(h1.double(), dim=1) - F.normalize(h2.double(), dim=1)).square().sum(dim=1).mean())


def uniformity(h: Tensor) -> float:
    """Log of the mean of exp(-2 d^2) over pairs of different images, -8 to 0 (Wang and Isola, t = 2); 0 collapsed."""
    squares = torch.pdist(F.normalize(h.double(), dim=1)).square()
    return float(torch.logsumexp(-2 * squares, dim=0) - math.log(len(squares)))


class CollapseMetrics:
    """The numbers above for one encoder after another, always on the same images and views.

    Parameters
    ----------
    images : Tensor
        Images of the data set, uint8, ``(n, channels, height, width)``.
    num_images : int
        How many of them are used, at least 2.
    augment : callable
        Makes the views for `alignment`.
    mean, std : sequence of float
        Of the data set, per channel.
    device : torch.device
        Where encoders run.
    seed : int
        Of the run.
    """

    def __init__(
        self,
        images: Tensor,
        *,
        num_images: int,
        augment: Augment,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        seed: int,
    ) -> None:
        generator = torch_generator(seed, "health")
        self._images = images[torch.randperm(len(images), generator=generator)[:num_images]]
        self._views = augment(self._images.to(device), generator)
        self._mean, self._std, self._device = mean, std, device

    def measure(self, encoder: nn.Module) -> dict[str, float]:
        """Return the numbers above by name, but for the spectrum."""
        h = extract(encoder, self._images, mean=self._mean, std=self._std, device=self._device)
        h1, h2 = (_forward(encoder, view) for view in self._views)
        return {
            "effective_rank": effective_rank(h),
            "covariance_rank": covariance_rank(h),
            "spread": dimension_std(h),
            "alignment": alignment(h1, h2),
            "uniformity": uniformity(h),
        }


def _forward(encoder: nn.Module, images: Tensor) -> Tensor:
    """Representations of images that are normalised already."""
    training = encoder.training
    with torch.inference_mode():
        h: Tensor = encoder.eval()(images).float().cpu()
    encoder.train(training)
    return h
