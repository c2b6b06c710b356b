"""Augmentation of a run: random parameters, and two random views of each image of a batch, on the images' device.

Parameters come from a CPU generator, so that CPUs and GPUs compute the same views. They are drawn for a whole epoch and
copied to the device at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate, repeat, takewhile
from typing import Any

import torch
from torch import Tensor

from fedssl.augmentation.recipe import UNIFORMS, Parameters, View, parameters, read_view
from fedssl.augmentation.views import AugmentationParams, Matrices, apply_both, apply_view, blur_matrices, crop_matrices
from fedssl.errors import InputError
from fedssl.machine.devices import is_gpu, to_device

CHUNK = 128  # images per block on a CPU: larger temporaries exceed the cache and cause page faults
MATRIX_BYTES = 2**26  # bytes of matrices that a GPU computes at a time
KERNEL_SIZE, KERNEL_CHANNELS = 64, (1, 3)  # largest images of `fedssl.augmentation.kernel`, and their channels


class Augmentation:
    """Computes two normalized random views of a batch of images.

    Parameters
    ----------
    size : int
        Height and width of the views in pixels.
    mean, std : sequence of float
        One number per channel, for images with values in [0, 1]; a view is ``(image - mean) / std``.
    views : sequence of mapping
        Two recipes: mappings of the fields of `fedssl.augmentation.recipe.View`.
    gpu_augmentation : {"torch", "triton"}
        Implementation on a GPU: torch operations, or `fedssl.augmentation.kernel`.
    """

    def __init__(
        self,
        *,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        views: Sequence[Mapping[str, Any]],
        gpu_augmentation: str = "torch",
    ) -> None:
        if len(views) != 2:
            raise InputError(f"augmentation.views has {len(views)} recipes; set exactly two")
        if not len(mean) == len(std) > 0 or min(std) <= 0:
            raise InputError(
                f"dataset.mean={list(mean)} and dataset.std={list(std)} are not valid; set one mean and one std "
                "above 0 for each channel"
            )
        if gpu_augmentation not in ("torch", "triton"):
            raise InputError(
                f"gpu_augmentation={gpu_augmentation} is unknown; set gpu_augmentation=torch or gpu_augmentation=triton"
            )
        if gpu_augmentation == "triton" and (size > KERNEL_SIZE or len(mean) not in KERNEL_CHANNELS):
            raise InputError(
                f"gpu_augmentation=triton supports views of at most {KERNEL_SIZE} pixels with 1 or 3 channels but "
                f"dataset.size={size} with {len(mean)} channels; set gpu_augmentation=torch"
            )
        self.size = size
        self.by_kernel = gpu_augmentation == "triton"
        self.views = [read_view(recipe, name=f"augmentation.views.{index}") for index, recipe in enumerate(views)]
        self._mean = torch.tensor(list(mean), dtype=torch.float32).view(-1, 1, 1, 1)
        self._std = torch.tensor(list(std), dtype=torch.float32).view(-1, 1, 1, 1)

    def __call__(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw parameters and compute two views of each image; see `sample_params` and `apply`."""
        (params,) = self.sample_params(
            [len(images)], image_shape=images.shape[1:], device=images.device, generator=generator
        )
        return self.apply(images, params)

    def sample_params(
        self, sizes: Sequence[int], *, image_shape: Sequence[int], device: torch.device, generator: torch.Generator
    ) -> Iterator[AugmentationParams]:
        """Draw parameters for batches of these sizes; all are copied to the device before the first is returned.

        ``image_shape`` is ``(channels, height, width)``, and ``device`` that of the images. The CPU ``generator`` is
        the only source of randomness; the draws of a batch do not depend on later batches.
        """
        channels, height, width = image_shape
        self._check(channels, height, width, device)
        orders, uniforms = [], []
        for size in sizes:
            orders.append([torch.randperm(4, generator=generator).tolist() for _ in self.views])
            uniforms.append(torch.rand(size, 2, UNIFORMS, generator=generator, dtype=torch.float64))
        uniform = torch.cat(uniforms)
        draws = [
            torch.stack(parameters(view, uniform[:, index], height=height, width=width))
            for index, view in enumerate(self.views)
        ]
        numbers = torch.stack(draws, 1).float()
        if is_gpu(device) and self.by_kernel:
            numbers = torch.cat((numbers, _per_image(orders, sizes)))
        packed = to_device(numbers, device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        if is_gpu(device) and not self.by_kernel:
            return self._with_matrices(packed, orders, sizes, image_shape)
        return (
            AugmentationParams(part, order) for part, order in zip(packed.split(list(sizes), 2), orders, strict=True)
        )

    def _with_matrices(
        self,
        packed: Tensor,
        orders: Sequence[Sequence[Sequence[int]]],
        sizes: Sequence[int],
        image_shape: Sequence[int],
    ) -> Iterator[AugmentationParams]:
        """Yield parameters with their matrices, which are computed for many batches at once."""
        max_images = MATRIX_BYTES // (
            8 * self.size * (image_shape[1] + image_shape[2] + self.size)
        )  # images: two views, 4 bytes a number
        start = 0
        while start < len(sizes):
            fitting = list(takewhile(lambda end: end <= max_images, accumulate(sizes[start:])))
            cut = list(sizes[start : start + max(1, len(fitting))])
            block, packed = packed.split([sum(cut), packed.shape[2] - sum(cut)], 2)
            made = [
                self._matrices(view, Parameters(*block[:, k]), image_shape, cut) for k, view in enumerate(self.views)
            ]
            for part, *matrices in zip(block.split(cut, 2), *made, strict=True):
                yield AugmentationParams(part.contiguous(), orders[start], tuple(matrices))
                start += 1

    def _matrices(
        self, view: View, params: Parameters, image_shape: Sequence[int], cut: list[int]
    ) -> Iterator[Matrices]:
        rows, columns = crop_matrices(view, params, height=image_shape[1], width=image_shape[2], size=self.size)
        blur = (
            blur_matrices(view, params.sigma, size=self.size).split(cut)
            if view.blur_prob > 0
            else repeat(None, len(cut))
        )
        return (Matrices(*maps) for maps in zip(rows.split(cut), columns.split(cut), blur, strict=True))

    def apply(
        self, images: Tensor, params: AugmentationParams, *, layout: torch.memory_format = torch.contiguous_format
    ) -> tuple[Tensor, Tensor]:
        """Compute two views of each image, float32 ``(batch, channels, size, size)``, on the device of the images.

        ``images`` are uint8, ``(batch, channels, height, width)``, on any device. ``params`` are those of
        `sample_params` for this batch size, image shape and device. ``layout`` is the memory format of the views.
        """
        batch, channels = images.shape[:2]
        if channels == 1:  # both layouts are equal; kernels choose by strides
            layout = torch.contiguous_format
        result = torch.empty(2 * batch, channels, self.size, self.size, device=images.device, memory_format=layout)
        views = result.chunk(2)
        if self.by_kernel and is_gpu(images.device):
            from fedssl.augmentation import kernel  # here: only this branch needs Triton

            numbers = params.parameters.contiguous()
            contiguous = images.contiguous()
            kernel.apply_views(contiguous, numbers, views=self.views, mean=self._mean, std=self._std, out=result)
            return views[0], views[1]
        if params.matrices:
            planes = images.permute(0, 2, 1, 3).to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            self._normalize(apply_both(planes.permute(2, 0, 1, 3), views=self.views, params=params), out=result)
            return views[0], views[1]
        for start in range(0, batch, CHUNK):
            part = slice(start, start + CHUNK)
            planes = images[part].transpose(0, 1).contiguous().float().div_(255)
            for index, view in enumerate(self.views):
                parameters, order = params.of(index, part), params.jitter_orders[index]
                made = apply_view(planes, view=view, params=parameters, order=order, size=self.size)
                self._normalize(made, out=views[index][part])
        return views[0], views[1]

    def _normalize(self, planes: Tensor, *, out: Tensor) -> None:
        torch.div(planes.sub_(self._mean), self._std, out=out.transpose(0, 1))

    def _check(self, channels: int, height: int, width: int, device: torch.device) -> None:
        if self.by_kernel and is_gpu(device):
            if max(height, width) > KERNEL_SIZE:
                raise InputError(
                    f"gpu_augmentation=triton supports images of at most {KERNEL_SIZE} pixels but these have "
                    f"{height}x{width}; set gpu_augmentation=torch"
                )
            if find_spec("triton") is None:
                raise InputError(
                    "gpu_augmentation=triton but Triton is not installed; install it, or set gpu_augmentation=torch"
                )
        if channels != len(self._mean):
            raise InputError(
                f"the images have {channels} channels but dataset.mean has {len(self._mean)} numbers; "
                "set one number per channel in dataset.mean and dataset.std"
            )
        widest = max(view.pad for view in self.views)
        if widest >= min(height, width):
            raise InputError(
                f"augmentation.views has pad={widest} but the images have {height}x{width} pixels; set pad to at "
                f"most {min(height, width) - 1}"
            )


def _per_image(orders: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int]) -> Tensor:
    """Repeat the order of each batch for its images, ``(4, 2, images)``."""
    return torch.tensor(orders, dtype=torch.float32).permute(2, 1, 0).repeat_interleave(torch.tensor(sizes), dim=2)
