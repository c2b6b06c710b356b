r"""Differences between the images of clients (feature shift): brightness, contrast, color, blur and noise.

$$
y = \operatorname{clip}\Big(G_{\sigma_k} * \big(b_k g_{k,c} (\bar{x} + a_k (x - \bar{x}))\big) + \tau_k \epsilon, 0, 1
\Big)
$$

with x the values of an image in [0, 1], $\bar{x}$ their mean, $a_k$ the contrast, $b_k$ the brightness and $g_{k,c}$
the gain of channel c of client k, uniform in $[1 - s, 1 + s]$ with s the strength, G a Gaussian with $\sigma_k$ pixels,
and $\epsilon$ standard normal; $\sigma_k$ and $\tau_k$ are uniform in $[0, s]$. NIID-Bench (Li et al., ICDE 2022) lets
the noise grow with the number of the client and draws it anew in every step.

A client's parameters are drawn once, and the noise of an image once, so that images are as if they were stored: equal
in all rounds, on all engines and with every ``dataset.storage``. They are computed when they are read, in memory for a
batch. Each image is computed by itself, so that its bits do not depend on its batch.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config.settings import FeatureShift, PartitionSettings
from fedssl.datasets.images import ImageSource, SelectedImages
from fedssl.partition.partition import clients_of_rows
from fedssl.seeding import derive_seed, numpy_generator

_FROM_0 = ("blur", "noise")  # parameters whose neutral value is 0; that of others is 1
_WIDTH = 3  # of the blur's window on each side, in standard deviations


def shifted(images: ImageSource, parts: Sequence[np.ndarray], settings: PartitionSettings) -> ImageSource:
    """Return the images as their clients have them. ``parts`` are the indices of each client's images."""
    shift, seed = settings.feature_shift, settings.seed
    if shift == FeatureShift():
        return images
    clients = torch.from_numpy(clients_of_rows(parts, len(images)))
    parameters = client_parameters(shift, len(parts), channels=images.shape[1], seed=seed)
    padded = {
        name: torch.from_numpy(np.concatenate([values, np.full_like(values[:1], name not in _FROM_0)]))
        for name, values in parameters.items()
    }
    return ShiftedImages(images, torch.arange(len(images)), clients, padded, shift, seed)


def client_parameters(settings: FeatureShift, num_clients: int, *, channels: int, seed: int) -> dict[str, np.ndarray]:
    """Draw the parameters of every client by name, float64 ``(clients, values)``; only those with a strength.

    A client's parameters depend neither on the number of clients nor on the other strengths.
    """
    drawn = {}
    for name, strength in vars(settings).items():
        if strength:
            size = (num_clients, channels if name == "color" else 1)
            uniform = numpy_generator(seed, "feature shift", name).random(size)
            drawn[name] = strength * uniform if name in _FROM_0 else 1 + strength * (2 * uniform - 1)
    return drawn


def parameter_table(settings: PartitionSettings, *, channels: int) -> list[list[str]]:
    """Return the parameters of every client, with a header of their names; empty without a shift."""
    shift, num_clients = settings.feature_shift, settings.num_clients
    if shift == FeatureShift():
        return []
    drawn = client_parameters(shift, num_clients, channels=channels, seed=settings.seed)
    names = [
        f"{name} {c}" if name == "color" else name for name, values in drawn.items() for c in range(values.shape[1])
    ]
    rows = np.concatenate(list(drawn.values()), axis=1).tolist()
    return [["client", *names], *([str(client), *(f"{value:.4g}" for value in row)] for client, row in enumerate(rows))]


class ShiftedImages(SelectedImages):
    """Images of clients, changed by the parameters of their client when they are read.

    ``clients`` has the client of every image of the source, int64, -1 for none. ``parameters`` are those of
    `client_parameters`, and a last row for images of no client.
    """

    def __init__(
        self,
        source: ImageSource,
        rows: Tensor,
        clients: Tensor,
        parameters: dict[str, Tensor],
        settings: FeatureShift,
        seed: int,
    ) -> None:
        super().__init__(source, rows)
        self._clients, self._parameters, self._settings, self._seed = clients, parameters, settings, seed

    def of(self, source: ImageSource, rows: Tensor) -> "ShiftedImages":
        return ShiftedImages(source, rows, self._clients, self._parameters, self._settings, self._seed)

    def changed(self, images: Tensor, rows: Tensor) -> Tensor:
        rows, device = rows.cpu(), images.device
        of_rows = {name: values[self._clients[rows]] for name, values in self._parameters.items()}
        factor = {name: values.float().to(device)[:, :, None, None] for name, values in of_rows.items()}
        top = 1.0 if images.is_floating_point() else float(torch.iinfo(images.dtype).max)
        x = images.float() / top
        if "contrast" in factor:
            # Integers have exact sums in any order.
            exact = images.double() if images.is_floating_point() else images.long()
            mean = (exact.sum(dim=(1, 2, 3), keepdim=True).double() / (math.prod(self.shape[1:]) * top)).float()
            x = mean + factor["contrast"] * (x - mean)
        for name in ("color", "brightness"):
            x = x * factor[name] if name in factor else x
        if "blur" in of_rows:
            x = blurred(x, of_rows["blur"].flatten(), radius=int(np.ceil(_WIDTH * self._settings.blur)))
        if "noise" in factor:
            x = x + factor["noise"] * self._noise(rows).to(device)
        x = x.clamp(0, 1)
        return x if images.is_floating_point() else (x * top).round().to(images.dtype)

    def _noise(self, rows: Tensor) -> Tensor:
        noise = torch.empty(len(rows), *self.shape[1:])
        for number, row in enumerate(rows.tolist()):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "feature noise", row))
            noise[number] = torch.randn(self.shape[1:], generator=generator)
        return noise


def blurred(images: Tensor, sigma: Tensor, *, radius: int) -> Tensor:
    """Blur each image, ``(n, channels, height, width)``, by a Gaussian with its sigma in pixels, float64 ``(n,)``.

    ``radius`` is that of the window, which is smaller for small images. Images are mirrored at their borders.
    """
    radius = min(radius, images.shape[2] - 1, images.shape[3] - 1)
    places = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-(places**2) / (2 * sigma.clamp(min=1e-3)[:, None] ** 2))
    weights = (weights / weights.sum(dim=1, keepdim=True)).float().to(images.device)[:, :, None, None]
    for dim, border in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
        padded, size = F.pad(images, border, mode="reflect"), images.shape[dim]
        images = torch.zeros_like(images)
        for place in range(2 * radius + 1):  # a convolution's order of sums depends on the batch
            images = images + weights[:, place : place + 1] * padded.narrow(dim, place, size)
    return images
