"""Augmentation of a run: random parameters, and random views of each image of a batch, on the images' device.

Parameters come from a CPU generator, so that CPUs and GPUs compute the same views. They are drawn for a whole epoch and
copied to the device at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import accumulate, repeat, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fedssl.augmentation.patch_masks import check_grid, sample_masks
from fedssl.augmentation.recipe import (
    FURTHER,
    FURTHER_UNIFORMS,
    RGB,
    UNIFORMS,
    Parameters,
    ViewRecipe,
    parameters,
    read_recipe,
)
from fedssl.augmentation.view_transforms import (
    AugmentationParams,
    Matrices,
    apply_all,
    apply_view,
    are_large,
    blur_matrices,
    crop_matrices,
)
from fedssl.datasets.raster import maximum
from fedssl.errors import InputError
from fedssl.machine.devices import is_gpu, to_device
from fedssl.machine.process import one_thread
from fedssl.views import GLOBAL, Mask, View, Views

CHUNK = 128  # images per block on a CPU: larger temporaries exceed the cache and cause page faults
LARGE_CHUNK = 4  # the same of large images, whose chunks are computed in parallel
MATRIX_BYTES = 2**26  # bytes of matrices that a GPU computes at a time
SMALLEST = 4  # height and width in pixels of the smallest view of a recipe with its own size
KERNEL_SIZE, KERNEL_CHANNELS = 64, (1, 3)  # largest images of `fedssl.augmentation.kernel`, and their channels
KERNEL_PARAMETERS = 12  # number of `Parameters` that it reads, the first ones


class Augmentation:
    """Computes normalized random views of a batch of images, ``(image - mean) / std``; global views come first.

    ``size`` is the height and width in pixels of a view with ``size`` 1. ``mean`` and ``std`` have one number per
    channel, for images with values in [0, 1]. ``views`` are recipes: mappings of the fields of
    `fedssl.augmentation.recipe.ViewRecipe`. ``gpu_augmentation`` "triton" uses `fedssl.augmentation.kernel` on a GPU.
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
        given = [read_recipe(recipe, name=f"augmentation.views.{index}") for index, recipe in enumerate(views)]
        recipes = [recipe for recipe in given if recipe.count]
        self.recipes = [repeated for recipe in recipes for repeated in [recipe] * recipe.count]
        self.recipes.sort(key=lambda recipe: recipe.role != GLOBAL)
        if not self.recipes or self.recipes[0].role != GLOBAL:
            raise InputError("augmentation.views has no global view; set role=global in one of its recipes")
        if not len(mean) == len(std) > 0 or min(std) <= 0:
            raise InputError(
                f"dataset.mean={list(mean)} and dataset.std={list(std)} are not valid; set one mean and one std "
                "above 0 for each channel"
            )
        if gpu_augmentation == "triton" and (size > KERNEL_SIZE or len(mean) not in KERNEL_CHANNELS):
            raise InputError(
                f"gpu_augmentation=triton supports views of at most {KERNEL_SIZE} pixels with 1 or 3 channels but "
                f"dataset.size={size} with {len(mean)} channels; set gpu_augmentation=torch"
            )
        if gpu_augmentation == "triton" and any(recipe.view.uses_further for recipe in recipes):
            raise InputError(
                f"gpu_augmentation=triton lacks {', '.join(_used(recipes, FURTHER))}; set gpu_augmentation=torch"
            )
        masked = any(recipe.mask for recipe in recipes)
        choices = "" if masked else "augmentation=satellite or microscopy, or "
        check_color(_used(recipes, RGB), channels=len(mean), choices=choices)
        self.channels = len(mean)
        self.uses_further = any(recipe.view.uses_further for recipe in recipes)
        self.by_kernel = gpu_augmentation == "triton"
        self.sizes = [round(recipe.size * size) for recipe in self.recipes]
        for recipe in recipes:
            pixels = round(recipe.size * size)
            if pixels < SMALLEST and recipe.size < 1:
                raise InputError(
                    f"{recipe.name}.size={recipe.size} gives views of {pixels} pixels; set it to at least "
                    f"{SMALLEST / size:g}, for views of {SMALLEST} pixels"
                )
            if recipe.mask is not None:
                check_grid(recipe.mask, size=pixels, name=f"{recipe.name}.mask")
        self._mean = torch.tensor(list(mean), dtype=torch.float32).view(-1, 1, 1, 1)
        self._std = torch.tensor(list(std), dtype=torch.float32).view(-1, 1, 1, 1)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Views:
        """Draw parameters and compute the views of each image; see `sample_params` and `apply`."""
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
        masks: list[list[Mask | None]] = []
        for size in sizes:
            orders.append([torch.randperm(4, generator=generator).tolist() for _ in self.recipes])
            uniforms.append(torch.rand(size, len(self.recipes), UNIFORMS, generator=generator, dtype=torch.float64))
            masks.append([self._sample_mask(index, size, generator) for index in range(len(self.recipes))])
            if self.uses_further:  # last, so that the draws of other recipes do not change
                shape = (size, len(self.recipes), FURTHER_UNIFORMS)
                uniforms[-1] = torch.cat((uniforms[-1], torch.rand(shape, generator=generator, dtype=torch.float64)), 2)
        uniform = torch.cat(uniforms)
        draws = [
            torch.stack(parameters(recipe.view, uniform[:, index], height=height, width=width))
            for index, recipe in enumerate(self.recipes)
        ]
        numbers = torch.stack(draws, 1).float()
        if is_gpu(device) and self.by_kernel:
            numbers = torch.cat((numbers[:KERNEL_PARAMETERS], _per_image(orders, sizes)))
        packed = to_device(numbers, device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        moved = _masks_to_device(masks, device)
        if is_gpu(device) and not self.by_kernel:
            return self._with_matrices(packed, orders, moved, sizes, image_shape)
        return map(AugmentationParams, packed.split(list(sizes), 2), orders, moved)

    def _sample_mask(self, index: int, batch: int, generator: torch.Generator) -> Mask | None:
        recipe = self.recipes[index].mask
        if recipe is None or recipe.patch is None:
            return None
        return sample_masks(recipe, batch, grid=self.sizes[index] // recipe.patch, generator=generator)

    def _with_matrices(
        self,
        packed: Tensor,
        orders: Sequence[Sequence[Sequence[int]]],
        masks: Sequence[Sequence[Mask | None]],
        sizes: Sequence[int],
        image_shape: Sequence[int],
    ) -> Iterator[AugmentationParams]:
        """Yield parameters with their matrices, which are computed for many batches at once."""
        numbers = sum(size * (image_shape[1] + image_shape[2] + size) for size in self.sizes)
        max_images = MATRIX_BYTES // (4 * numbers)  # 4 bytes a number
        start = 0
        while start < len(sizes):
            fitting = list(takewhile(lambda end: end <= max_images, accumulate(sizes[start:])))
            cut = list(sizes[start : start + max(1, len(fitting))])
            block, packed = packed.split([sum(cut), packed.shape[2] - sum(cut)], 2)
            made = [self._matrices(k, Parameters(*block[:, k]), image_shape, cut) for k in range(len(self.recipes))]
            for part, *matrices in zip(block.split(cut, 2), *made, strict=True):
                yield AugmentationParams(part.contiguous(), orders[start], masks[start], tuple(matrices))
                start += 1

    def _matrices(
        self, index: int, params: Parameters, image_shape: Sequence[int], cut: list[int]
    ) -> Iterator[Matrices]:
        view, size = self.recipes[index].view, self.sizes[index]
        rows, columns = crop_matrices(view, params, height=image_shape[1], width=image_shape[2], size=size)
        blur = blur_matrices(view, params.sigma, size=size).split(cut) if view.blur_prob > 0 else repeat(None, len(cut))
        return (Matrices(*maps) for maps in zip(rows.split(cut), columns.split(cut), blur, strict=True))

    def apply(
        self, images: Tensor, params: AugmentationParams, *, layout: torch.memory_format = torch.contiguous_format
    ) -> Views:
        """Compute the views of each image, float32 ``(batch, channels, size, size)``, on the device of the images.

        ``images`` are ``(batch, channels, height, width)`` of a dtype of `fedssl.datasets.raster.MAXIMA`, on any
        device. ``params`` are those of `sample_params` for this batch size, image shape and device. ``layout`` is the
        memory format of the views.
        """
        computed: list[Tensor] = [images] * len(self.recipes)
        for size in dict.fromkeys(self.sizes):
            indices = [index for index, other in enumerate(self.sizes) if other == size]
            for index, view in zip(indices, self._views_of_size(size, indices, images, params, layout), strict=True):
                computed[index] = view
        parts = zip(computed, self.recipes, params.masks, strict=True)
        return Views(tuple(View(view, recipe.role, mask) for view, recipe, mask in parts))

    def _views_of_size(
        self, size: int, indices: list[int], images: Tensor, params: AugmentationParams, layout: torch.memory_format
    ) -> Sequence[Tensor]:
        """Compute the views with these indices, whose sizes are equal, in memory that follows each other."""
        batch, channels = images.shape[:2]
        if channels == 1:  # both layouts are equal; kernels choose by strides
            layout = torch.contiguous_format
        recipes = [self.recipes[index].view for index in indices]
        shape = (len(indices) * batch, channels, size, size)
        result = torch.empty(shape, device=images.device, memory_format=layout)
        views = result.chunk(len(indices))
        if self.by_kernel and is_gpu(images.device):
            from fedssl.augmentation import kernel  # here: only this branch needs Triton

            numbers = params.subset(indices).parameters.contiguous()
            contiguous = images.contiguous()
            kernel.apply_views(contiguous, numbers, views=recipes, mean=self._mean, std=self._std, out=result)
        elif params.matrices:
            floats = images.permute(0, 2, 1, 3).to(torch.float32, memory_format=torch.contiguous_format)
            planes = floats.div_(maximum(images.dtype))
            made = apply_all(planes.permute(2, 0, 1, 3), views=recipes, params=params.subset(indices))
            self._normalize(made, out=result)
        else:
            self._apply_on_cpu(size, indices, images, params, views)
        return views

    def _apply_on_cpu(
        self, size: int, indices: list[int], images: Tensor, params: AugmentationParams, views: Sequence[Tensor]
    ) -> None:
        """Compute views of this size a few images at a time."""
        large = are_large(size, *images.shape[2:])
        chunk, threads = (LARGE_CHUNK, torch.get_num_threads()) if large else (CHUNK, 1)

        def compute(start: int) -> None:
            part = slice(start, start + chunk)
            planes = images[part].transpose(0, 1).contiguous().float().div_(maximum(images.dtype))
            for index, out in zip(indices, views, strict=True):
                view, drawn, order = self.recipes[index].view, params.of(index, part), params.jitter_orders[index]
                self._normalize(apply_view(planes, view=view, params=drawn, order=order, size=size), out=out[part])

        starts = range(0, len(images), chunk)
        if threads == 1:
            for start in starts:
                compute(start)
        else:  # torch's own threads would wait for each other after each of many short operations
            with one_thread(), ThreadPoolExecutor(threads) as pool:
                list(pool.map(compute, starts))

    def _normalize(self, planes: Tensor, *, out: Tensor) -> None:
        torch.div(planes.sub_(self._mean), self._std, out=out.transpose(0, 1))

    def denormalize(self, views: Tensor) -> Tensor:
        """Return normalized views ``(batch, channels, height, width)`` as values in [0, 1]."""
        mean, std = (numbers.to(views.device).view(1, -1, 1, 1) for numbers in (self._mean, self._std))
        return views * std + mean

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
        widest = max(recipe.view.pad for recipe in self.recipes)
        if widest >= min(height, width):
            raise InputError(
                f"augmentation.views has pad={widest} but the images have {height}x{width} pixels; set pad to at "
                f"most {min(height, width) - 1}"
            )


def check_color(used: Sequence[str], *, channels: int, choices: str = "") -> None:
    """Reject settings for RGB that are on for images with another number of channels; 1 channel skips them.

    ``choices`` are further remedies in the message.
    """
    if used and channels not in (1, 3):
        names = dict.fromkeys(key.rpartition(".")[2] for key in used)
        raise InputError(
            f"the images have {channels} channels but {', '.join(names)} of views need 3 (RGB); set {choices}"
            f"{' '.join(f'{key}=0' for key in used)}"
        )


def _used(recipes: Sequence[ViewRecipe], names: Sequence[str]) -> list[str]:
    """Return the keys of these settings that are on."""
    return [f"{each.name}.{name}" for each in recipes for name in names if vars(each.view)[name]]


def _per_image(orders: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int]) -> Tensor:
    """Repeat the order of each batch for its images, ``(4, views, images)``."""
    return torch.tensor(orders, dtype=torch.float32).permute(2, 1, 0).repeat_interleave(torch.tensor(sizes), dim=2)


def _masks_to_device(masks: list[list[Mask | None]], device: torch.device) -> list[list[Mask | None]]:
    """Copy the masks of all batches at once; numbers of patches fit into 32 bits."""
    tensors = [leaf for leaf in tree_leaves(masks) if isinstance(leaf, Tensor)]
    if not tensors:
        return masks
    packed = to_device(torch.cat([part.flatten().to(torch.int32) for part in tensors]), device)
    pieces = iter(packed.split([part.numel() for part in tensors]))
    moved: list[list[Mask | None]] = tree_map_only(Tensor, lambda x: next(pieces).view(x.shape).to(x.dtype), masks)
    return moved
