"""Compares the views of the kernel with those of a CPU, by recipe; run in Triton's interpreter by `test_kernel`."""

import sys
from unittest.mock import patch

import torch

from fedssl.augmentation import Augmentation
from fedssl.machine import devices
from tests.fedssl.augmentation.made import EVERYTHING, RECIPES, generator, random_images, recipe_views

CPU = torch.device("cpu")
SIZES = [3, 2]  # of two batches, whose jitter has different orders


def largest_difference(
    views: list, *, channels: int, form: tuple[int, int], size: int, layout: torch.memory_format
) -> float:
    """Of pixels from 0 to 1."""
    statistics = {"mean": [0.4, 0.5, 0.6][:channels], "std": [0.2, 0.25, 0.3][:channels]}
    usual, by_kernel = (
        Augmentation(size=size, views=views, gpu_augmentation=way, **statistics) for way in ("torch", "triton")
    )
    images, source, ahead = random_images(sum(SIZES), channels, *form).split(SIZES), generator(), generator()
    expected = [usual(batch, source).images for batch in images]
    with patch.object(devices, "CPU", "none"), patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone):
        drawn = by_kernel.sample_params(SIZES, image_shape=(channels, *form), device=CPU, generator=ahead)
        made = [by_kernel.apply(batch, own, layout=layout).images for batch, own in zip(images, drawn, strict=True)]
    std = torch.tensor(statistics["std"])[:, None, None]
    pairs = [pair for both in zip(made, expected, strict=True) for pair in zip(*both, strict=True)]
    return max(((one - other) * std).abs().max().item() for one, other in pairs)


def main() -> None:
    torch.set_num_threads(1)
    recipes = {path.stem: recipe_views(path.stem) for path in sorted(RECIPES.glob("*.yaml"))}
    lacking = ("medical", "microscopy", "satellite")
    names = [name for name in recipes if name not in lacking]
    cases = [(name, channels, (size, size), size) for name in names for channels in (1, 3) for size in (8, 24, 32, 64)]
    recipes["everything"] = [EVERYTHING | {"pad": 3}, EVERYTHING | {"blur_prob": 0.0}]
    cases += [("everything", 3, (12, 20), 16), ("everything", 1, (20, 9), 33)]
    failed = False
    for number, (name, channels, form, size) in enumerate(cases):
        layout = (torch.channels_last, torch.contiguous_format)[number % 2]
        found = largest_difference(recipes[name], channels=channels, form=form, size=size, layout=layout)
        failed |= not found < 1e-5
        print(f"{name} with {channels} channels, {form} pixels to {size}: {found:.1e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
