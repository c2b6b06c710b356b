"""Two random views of every picture of a batch, on the device where the batch is.

The views of SimCLR (Chen et al. 2020, appendix A) and BYOL (Grill et al. 2020, appendix B): random resized crop, flip,
colour jitter, grey, Gaussian blur and solarisation, in this order. Every picture has parameters of its own
(`fedssl.augmentation.recipe`), and for equal parameters the pixels are torchvision's within 1e-5
(`fedssl.augmentation.operations`). Differences from a torchvision pipeline of one picture at a time:

- the order of the four jitter operations is drawn once per view and call, not once per picture;
- blur reaches 3 of the recipe's largest sigma in place of a kernel size that is a setting of its own;
- saturation, hue and grey are left out unless there are 3 channels.

Parameters come from a CPU generator, so a CPU and a GPU make the same views. They are drawn for an epoch at a time and
go to the device in one copy. The cost of the matrix products grows with the cube of the picture size: right for
pictures up to about 100 pixels wide.

A CPU makes one view after the other, a few pictures at a time, as caches like it. A GPU works on all pictures at once
and, as far as the order of the jitter allows, on both views, because there every operation costs a launch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedssl.augmentation import operations
from fedssl.augmentation.recipe import UNIFORMS, Parameters, View, parameters, read_view
from fedssl.errors import InputError
from fedssl.machine.devices import is_gpu, to_device

CHUNK = 128  # pictures worked on at a time on a CPU: larger temporaries leave the cache and cost page faults
MATRICES = 2**26  # bytes of matrices that a GPU makes at a time
HUE = 3  # among the jitter operations


class Matrices(NamedTuple):
    """Linear maps that depend on nothing but the parameters of a view.

    Attributes
    ----------
    rows, columns : Tensor
        Of crop, resize and flip, ``(batch, size, height)`` and ``(batch, size, width)``.
    blur : Tensor or None
        Of blur, ``(batch, size, size)``, for rows and columns; None if the recipe has none.
    """

    rows: Tensor
    columns: Tensor
    blur: Tensor | None


@dataclass(frozen=True)
class Drawn:
    """What chance says about a batch.

    Attributes
    ----------
    parameters : Tensor
        The numbers of `Parameters` for both views, ``(12, 2, batch)``, on the device of the pictures.
    orders : sequence of sequence of int
        Of the jitter operations, for each view: 0 is brightness, 1 contrast, 2 saturation, 3 hue.
    matrices : tuple of Matrices
        Of each view if they are made ahead, else empty.
    """

    parameters: Tensor
    orders: Sequence[Sequence[int]]
    matrices: tuple[Matrices, ...] = ()

    def of(self, view: int, part: slice = slice(None)) -> Parameters:
        """Parameters of one view, of some of the pictures."""
        return Parameters(*self.parameters[:, view, part])


def crop_matrices(view: View, drawn: Parameters, *, height: int, width: int, size: int) -> tuple[Tensor, Tensor]:
    """Matrices of rows and columns that crop, resize and flip."""
    pad = view.pad
    rows = operations.crop_weights(drawn.top + pad, drawn.height, size=height + 2 * pad, out=size)
    columns = operations.crop_weights(drawn.left + pad, drawn.width, size=width + 2 * pad, out=size, flip=drawn.flip)
    return (operations.mirror(rows, pad=pad), operations.mirror(columns, pad=pad)) if pad else (rows, columns)


def blur_matrices(view: View, sigma: Tensor, *, size: int) -> Tensor:
    """Matrices of blur."""
    return operations.blur_weights(sigma, size=size, radius=min(math.ceil(3 * view.blur_sigma[1]), size - 1))


def jitter(planes: Tensor, *, view: View, drawn: Parameters, order: Sequence[int]) -> Tensor:
    """Those of the jitter operations that are in ``order`` and turned on."""
    color = len(planes) == 3
    steps = (
        (view.brightness > 0, operations.brightness, drawn.brightness),
        (view.contrast > 0, operations.contrast, drawn.contrast),
        (view.saturation > 0 and color, operations.saturation, drawn.saturation),
        (view.hue > 0 and color, operations.hue, drawn.hue),
    )
    for used, operation, factor in (steps[index] for index in order):
        if used and view.jitter > 0:
            planes = operation(planes, factor)
    return planes


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
        Order of the jitter operations, see `Drawn`.
    size : int
        Height and width of the views in pixels.

    Returns
    -------
    Tensor
        ``(channels, batch, size, size)``.
    """
    rows, columns = crop_matrices(view, drawn, height=planes.shape[2], width=planes.shape[3], size=size)
    planes = operations.separable(planes, rows=rows, columns=columns)
    planes = jitter(planes, view=view, drawn=drawn, order=order)
    if view.gray > 0 and len(planes) == 3:
        planes = operations.saturation(planes, drawn.color)
    if view.blur > 0:
        chosen = drawn.sigma.nonzero()[:, 0]
        weights = blur_matrices(view, drawn.sigma[chosen], size=size)
        planes[:, chosen] = operations.separable(planes[:, chosen], rows=weights, columns=weights)
    if view.solarize > 0:
        planes = operations.solarize(planes, drawn.solarize)
    return planes


def make_both(planes: Tensor, *, views: Sequence[View], drawn: Drawn) -> Tensor:
    """Make both views at once, with matrices made ahead: what `make_view` makes of each, in few launches.

    Pictures of which an operation is off have neutral parameters; nothing is chosen, which one would have to wait for.

    Returns
    -------
    Tensor
        First view 1 of every picture, then view 2, ``(channels, 2 * batch, size, size)``.
    """
    color = len(planes) == 3
    both = Parameters(*drawn.parameters.flatten(1))
    made = [operations.separable(planes, rows=maps.rows, columns=maps.columns) for maps in drawn.matrices]
    turns = [order.index(HUE) for order in drawn.orders]
    each = list(zip(views, (drawn.of(0), drawn.of(1)), drawn.orders, turns, strict=True))
    made = [jitter(x, view=v, drawn=d, order=o[:at]) for x, (v, d, o, at) in zip(made, each, strict=True)]
    if color and any(view.hue > 0 and view.jitter > 0 for view in views):
        made = list(operations.hue(torch.cat(made, 1), both.hue).chunk(2, 1))
    made = [jitter(x, view=v, drawn=d, order=o[at + 1 :]) for x, (v, d, o, at) in zip(made, each, strict=True)]
    planes = torch.cat(made, 1)
    if color and any(view.gray > 0 for view in views):
        planes = operations.saturation(planes, both.color)
    if any(view.blur > 0 for view in views):
        planes = _blur(planes, drawn.matrices)
    if any(view.solarize > 0 for view in views):
        planes = operations.solarize(planes, both.solarize)
    return planes


def _blur(planes: Tensor, matrices: Sequence[Matrices]) -> Tensor:
    """Blur those views whose recipes have it."""
    parts = [
        part if maps.blur is None else operations.separable(part, rows=maps.blur, columns=maps.blur)
        for part, maps in zip(planes.chunk(2, 1), matrices, strict=True)
    ]
    return torch.cat(parts, 1)


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
        """Make two views of every picture, with parameters drawn for them alone; see `draw` and `make`."""
        (drawn,) = self.draw([len(images)], form=images.shape[1:], device=images.device, generator=generator)
        return self.make(images, drawn)

    def draw(
        self, sizes: Sequence[int], *, form: Sequence[int], device: torch.device, generator: torch.Generator
    ) -> Iterator[Drawn]:
        """Parameters for batches of these sizes, all drawn and brought to the device before the first is given.

        Parameters
        ----------
        sizes : sequence of int
            Pictures of each batch.
        form : sequence of int
            Channels, height and width of the pictures.
        device : torch.device
            Where the pictures will be.
        generator : torch.Generator
            CPU generator, the only source of chance. What a batch takes of it does not depend on those that follow.

        Raises
        ------
        InputError
            If the pictures have more or fewer channels than ``mean`` has numbers, or are no larger than a border.
        """
        channels, height, width = form
        self._check(channels, height, width)
        orders, uniforms = [], []
        for size in sizes:
            orders.append([torch.randperm(4, generator=generator).tolist() for _ in self.views])
            uniforms.append(torch.rand(size, 2, UNIFORMS, generator=generator, dtype=torch.float64))
        uniform = torch.cat(uniforms)
        draws = [
            torch.stack(parameters(view, uniform[:, index], height=height, width=width))
            for index, view in enumerate(self.views)
        ]
        packed = to_device(torch.stack(draws, 1).float(), device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        if is_gpu(device):
            return self._with_matrices(packed, orders, sizes, form)
        return (Drawn(part, order) for part, order in zip(packed.split(list(sizes), 2), orders, strict=True))

    def _with_matrices(
        self, packed: Tensor, orders: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int], form: Sequence[int]
    ) -> Iterator[Drawn]:
        """Parameters with their matrices, which are made for many batches at once."""
        most = MATRICES // (8 * self.size * (form[1] + form[2] + self.size))  # pictures: two views, 4 bytes a number
        start = 0
        while start < len(sizes):
            fitting = sum(1 for end in accumulate(sizes[start:]) if end <= most)
            cut = list(sizes[start : start + max(1, fitting)])
            block, packed = packed.split([sum(cut), packed.shape[2] - sum(cut)], 2)
            made = [self._matrices(view, Parameters(*block[:, k]), form, cut) for k, view in enumerate(self.views)]
            for part, *matrices in zip(block.split(cut, 2), *made, strict=True):
                yield Drawn(part.contiguous(), orders[start], tuple(matrices))
                start += 1

    def _matrices(self, view: View, drawn: Parameters, form: Sequence[int], cut: list[int]) -> Iterator[Matrices]:
        """Matrices of a view, batch by batch."""
        rows, columns = crop_matrices(view, drawn, height=form[1], width=form[2], size=self.size)
        blur = blur_matrices(view, drawn.sigma, size=self.size).split(cut) if view.blur > 0 else repeat(None, len(cut))
        return (Matrices(*maps) for maps in zip(rows.split(cut), columns.split(cut), blur, strict=True))

    def make(
        self, images: Tensor, drawn: Drawn, *, layout: torch.memory_format = torch.contiguous_format
    ) -> tuple[Tensor, Tensor]:
        """Make two views of every picture.

        Parameters
        ----------
        images : Tensor
            uint8, ``(batch, channels, height, width)``, on any device.
        drawn : Drawn
            What `draw` gave for a batch of this size and such pictures on this device.
        layout : torch.memory_format
            Of the views in memory.

        Returns
        -------
        tuple of Tensor
            Two float32 tensors ``(batch, channels, size, size)`` on the device of ``images``.
        """
        batch, channels = images.shape[:2]
        if channels == 1:  # either layout; kernels that choose by strides shall go on with the usual one
            layout = torch.contiguous_format
        result = torch.empty(2 * batch, channels, self.size, self.size, device=images.device, memory_format=layout)
        views = result.chunk(2)
        if drawn.matrices:
            planes = images.permute(0, 2, 1, 3).to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            self._normalize(make_both(planes.permute(2, 0, 1, 3), views=self.views, drawn=drawn), out=result)
            return views[0], views[1]
        for start in range(0, batch, CHUNK):
            part = slice(start, start + CHUNK)
            planes = images[part].transpose(0, 1).contiguous().float().div_(255)
            for index, view in enumerate(self.views):
                parameters, order = drawn.of(index, part), drawn.orders[index]
                made = make_view(planes, view=view, drawn=parameters, order=order, size=self.size)
                self._normalize(made, out=views[index][part])
        return views[0], views[1]

    def _normalize(self, planes: Tensor, *, out: Tensor) -> None:
        torch.div(planes.sub_(self._mean), self._std, out=out.transpose(0, 1))

    def _check(self, channels: int, height: int, width: int) -> None:
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
