"""Two random views of every picture of a batch, on the device where the batch is.

The views of SimCLR (Chen et al. 2020, appendix A) and BYOL (Grill et al. 2020, appendix B): random resized crop, flip,
colour jitter, grey, Gaussian blur and solarisation, in this order. Every picture has parameters of its own
(`fedssl.augmentation.recipe`), and for equal parameters the pixels are torchvision's within 1e-5
(`fedssl.augmentation.operations`). Differences from a torchvision pipeline of one picture at a time:

- the order of the four jitter operations is drawn once per view and call, not once per picture;
- blur reaches 3 of the recipe's largest sigma in place of a kernel size that is a setting of its own;
- saturation, hue and grey are left out unless there are 3 channels.

Parameters come from a CPU generator, so a CPU and a GPU make the same views, and go to the device in one copy. The cost
of the matrix products grows with the cube of the picture size: right for pictures up to about 100 pixels wide.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedssl.augmentation import operations
from fedssl.augmentation.recipe import UNIFORMS, Parameters, View, parameters, read_view
from fedssl.errors import InputError
from fedssl.machine.devices import to_device

CHUNK = 128  # pictures worked on at a time on a CPU: larger temporaries leave the cache and cost page faults


def make_view(planes: Tensor, *, view: View, drawn: Parameters, order: Sequence[int], size: int) -> Tensor:
    """Make one view of every picture; operations that the recipe turns off for all of them are left out.

    Parameters
    ----------
    planes : Tensor
        Pictures ``(channels, batch, height, width)`` with values in [0, 1].
    view : View
        The recipe.
    drawn : Parameters
        Random parameters of every picture.
    order : sequence of int
        Order of the jitter operations: 0 is brightness, 1 contrast, 2 saturation, 3 hue.
    size : int
        Height and width of the views in pixels.

    Returns
    -------
    Tensor
        ``(channels, batch, size, size)``.
    """
    color = len(planes) == 3
    pad, (height, width) = view.pad, planes.shape[2:]
    rows = operations.crop_weights(drawn.top + pad, drawn.height, size=height + 2 * pad, out=size)
    columns = operations.crop_weights(drawn.left + pad, drawn.width, size=width + 2 * pad, out=size, flip=drawn.flip)
    if pad:
        rows, columns = operations.mirror(rows, pad=pad), operations.mirror(columns, pad=pad)
    planes = operations.separable(planes, rows=rows, columns=columns)
    jitter = (
        (view.brightness > 0, operations.brightness, drawn.brightness),
        (view.contrast > 0, operations.contrast, drawn.contrast),
        (view.saturation > 0 and color, operations.saturation, drawn.saturation),
        (view.hue > 0 and color, operations.hue, drawn.hue),
    )
    for used, operation, factor in (jitter[index] for index in order):
        if used and view.jitter > 0:
            planes = operation(planes, factor)
    if view.gray > 0 and color:
        planes = operations.saturation(planes, drawn.color)
    if view.blur > 0:
        radius = min(math.ceil(3 * view.blur_sigma[1]), size - 1)
        # A GPU blurs all: to choose, one would have to wait for it.
        chosen = slice(None) if planes.is_cuda else drawn.sigma.nonzero()[:, 0]
        weights = operations.blur_weights(drawn.sigma[chosen], size=size, radius=radius)
        planes[:, chosen] = operations.separable(planes[:, chosen], rows=weights, columns=weights)
    if view.solarize > 0:
        planes = operations.solarize(planes, drawn.solarize)
    return planes


class Augmentation:
    """Makes two normalised random views of a batch of pictures.

    Parameters
    ----------
    size : int
        Height and width of the views in pixels.
    mean, std : sequence of float
        One number per channel, of pictures with values in [0, 1]; a view is ``(picture - mean) / std``.
    views : sequence of mapping
        Two recipes: mappings of the fields of `fedssl.augmentation.recipe.View`.

    Raises
    ------
    InputError
        If there are not exactly two views, or a setting is outside its range.
    """

    def __init__(
        self, *, size: int, mean: Sequence[float], std: Sequence[float], views: Sequence[Mapping[str, Any]]
    ) -> None:
        if len(views) != 2:
            raise InputError(f"augmentation.views has {len(views)} recipes; give exactly two")
        if not len(mean) == len(std) > 0 or min(std) <= 0:
            raise InputError(
                f"dataset.mean={list(mean)} and dataset.std={list(std)} do not fit; give one mean and one std above 0 "
                "for every channel"
            )
        self.size = size
        self.views = [read_view(recipe, name=f"augmentation.views.{index}") for index, recipe in enumerate(views)]
        self._mean = torch.tensor(list(mean), dtype=torch.float32).view(-1, 1, 1, 1)
        self._std = torch.tensor(list(std), dtype=torch.float32).view(-1, 1, 1, 1)

    def __call__(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Make two views of every picture.

        Parameters
        ----------
        images : Tensor
            uint8, ``(batch, channels, height, width)``, on any device.
        generator : torch.Generator
            CPU generator, the only source of chance.

        Returns
        -------
        tuple of Tensor
            Two float32 tensors ``(batch, channels, size, size)`` on the device of ``images``.

        Raises
        ------
        InputError
            If the pictures have more or fewer channels than ``mean`` has numbers, or are no larger than a border.
        """
        batch, channels, height, width = images.shape
        if channels != len(self._mean):
            raise InputError(
                f"the pictures have {channels} channels but dataset.mean has {len(self._mean)} numbers; "
                "give dataset.mean and dataset.std one number for every channel"
            )
        widest = max(view.pad for view in self.views)
        if widest >= min(height, width):
            raise InputError(
                f"augmentation.views has pad={widest} but the pictures have {height}x{width} pixels, which mirror at "
                f"most {min(height, width) - 1}; set pad to that or less"
            )
        orders = [torch.randperm(4, generator=generator).tolist() for _ in self.views]
        uniform = torch.rand(batch, 2, UNIFORMS, generator=generator, dtype=torch.float64)
        draws = [
            torch.stack(parameters(view, uniform[:, index], height=height, width=width))
            for index, view in enumerate(self.views)
        ]
        packed = to_device(torch.stack(draws).float(), images.device)
        self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)

        results = [torch.empty(batch, channels, self.size, self.size, device=images.device) for _ in self.views]
        chunk = CHUNK if images.device.type == "cpu" else batch
        for start in range(0, batch, chunk):
            part = slice(start, start + chunk)
            planes = images[part].transpose(0, 1).contiguous().float().div_(255)
            for view, order, drawn, result in zip(self.views, orders, packed, results, strict=True):
                made = make_view(planes, view=view, drawn=Parameters(*drawn[:, part]), order=order, size=self.size)
                torch.div(made.sub_(self._mean), self._std, out=result[part].transpose(0, 1))
        return results[0], results[1]
