"""Two views of a batch."""

import math
import re

import pytest
import torch
import torchvision.transforms.v2.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torchvision.transforms.v2 import InterpolationMode

from fedssl.augmentation import Augmentation, operations
from fedssl.augmentation import augmentation as module
from fedssl.augmentation.augmentation import CHUNK, LARGE_CHUNK
from fedssl.augmentation.recipe import FURTHER_UNIFORMS, UNIFORMS, ViewOptions, parameters
from fedssl.augmentation.view_transforms import LARGE
from fedssl.errors import InputError
from fedssl.machine import devices
from fedssl.machine.process import one_thread
from tests.cases import some
from tests.fedssl.augmentation.made import (
    COLORLESS,
    EVERYTHING,
    FURTHER,
    JITTER,
    RECIPES,
    augmentation,
    augmentation_of,
    close,
    generator,
    normalized,
    random_images,
    recipe_views,
)

# Whole batches.

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def colorless(image, step, factor):
    """Return brightness (step 0) or contrast of images with any number of channels, which torchvision rejects."""
    return (factor * image + (1 - factor) * step * image.mean()).clamp(0, 1)


def torchvision_view(image, one, *, order, size, pad, radius):
    """Return one view, by torchvision's functions for one image with values in [0, 1]."""
    image, color = F.pad(image, [pad], padding_mode="reflect"), len(image) == 3
    top, left, height, width = (int(one[name]) for name in ("top", "left", "height", "width"))
    image = F.resized_crop(image, top + pad, left + pad, height, width, [size, size])
    image = F.horizontal_flip(image) if one["flip"] else image
    image = F.vertical_flip(image) if one["vertical"] else image
    image = F.vertical_flip(F.rotate(image, 90)) if one["transpose"] else image  # a quarter turn and a flip
    image = F.rotate(image, one["angle"], InterpolationMode.BILINEAR) if one["angle"] else image
    factors = [one["brightness"], one["contrast"], one["saturation"], one["hue"]]
    for step in order:
        if color or step < 2:
            image = (
                JITTER[step](image, factors[step]) if len(image) in (1, 3) else colorless(image, step, factors[step])
            )
    image = F.adjust_gamma(image, one["gamma"])
    image = image if one["color"] or not color else F.rgb_to_grayscale(image, 3)
    image = F.gaussian_blur(image, [2 * radius + 1] * 2, [one["sigma"]] * 2) if one["sigma"] else image
    image = F.solarize(image, 0.5) if one["solarize"] else image
    noise, seed = (torch.tensor([one[name]]) for name in ("noise", "seed"))
    return operations.add_noise(image[:, None], noise, seed)[:, 0] if noise else image


ALWAYS = {**EVERYTHING, "jitter_prob": 1.0, "gray_prob": 1.0, "blur_prob": 1.0, "solarize_prob": 1.0}


@pytest.mark.parametrize(
    ("count", "shape", "size", "recipe"),
    [
        (40, (3, 20, 20), 16, EVERYTHING),
        (2 * LARGE_CHUNK + 1, (3, 224, 224), 224, EVERYTHING),
        (6, (3, 200, 301), 129, EVERYTHING),  # most crops are larger than the view, and tiles are incomplete
        (6, (3, 40, 33), 224, EVERYTHING),
        (6, (3, 128, 128), 32, EVERYTHING | {"pad": 9}),
        (6, (3, 224, 224), 17, EVERYTHING),
        (6, (3, 130, 131), 145, EVERYTHING | {"blur_sigma": [3.0, 9.0]}),
        (6, (1, 224, 224), 224, EVERYTHING),
        (1, (3, 224, 224), 224, ALWAYS | {"flip_prob": 1.0}),
        (3, (3, 224, 224), 224, ALWAYS | {"flip_prob": 0.0, "gray_prob": 0.0}),
        (3, (3, 224, 224), 224, {}),
        (40, (3, 20, 20), 16, EVERYTHING | FURTHER),
        (20, (13, 20, 20), 16, EVERYTHING | COLORLESS | FURTHER),
        (2 * LARGE_CHUNK + 1, (4, 140, 130), 129, EVERYTHING | COLORLESS | FURTHER),
    ],
)
def test_views_equal_a_torchvision_pipeline_with_the_same_parameters(count, shape, size, recipe):
    images, (channels, height, width) = random_images(count, *shape), shape
    recipes = [recipe, {**recipe, "blur_prob": 0.0}]
    actual = augmentation(*recipes, size=size, channels=channels)(images, generator(3))
    source = generator(3)
    orders = [torch.randperm(4, generator=source).tolist() for _ in range(2)]
    uniform = torch.rand(count, 2, UNIFORMS, generator=source, dtype=torch.float64)
    if "noise_prob" in recipe:
        further = torch.rand(count, 2, FURTHER_UNIFORMS, generator=source, dtype=torch.float64)
        uniform = torch.cat((uniform, further), dim=2)
    for index, options in enumerate(ViewOptions(**values) for values in recipes):
        drawn = parameters(options, uniform[:, index], height=height, width=width)
        radius = min(math.ceil(3 * options.blur_sigma[1]), size - 1)
        for k in range(count):
            one = {name: float(values[k]) for name, values in drawn._asdict().items()}
            image = torchvision_view(
                images[k] / 255, one, order=orders[index], size=size, pad=options.pad, radius=radius
            )
            # 0.2: the smallest std. The position of a rotated pixel has an error of about 1e-5 pixels, and gamma
            # amplifies errors of small values.
            close(0.2 * actual[index][k], 0.2 * normalized(255 * image[None])[0], atol=1e-4 if one["angle"] else 1e-5)


def test_large_views_do_not_depend_on_threads():
    images, make = random_images(2 * LARGE_CHUNK + 1, 3, LARGE, LARGE), augmentation(EVERYTHING, size=LARGE)
    with one_thread():
        expected = make(images, generator())
        torch.set_num_threads(3)
        for view, other in zip(make(images, generator()), expected, strict=True):
            assert torch.equal(view, other)
        assert torch.get_num_threads() == 3


def test_same_seed_same_views_and_global_generator_untouched():
    images, state = random_images(9, 3, 16, 16), torch.get_rng_state()
    make = augmentation(EVERYTHING)
    first, again, other = (make(images, generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.allclose(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_gray_images_have_no_color_operations():
    images = random_images(12, 1, 8, 8)
    views = augmentation(EVERYTHING, size=8, channels=1)(images, generator())
    expected = augmentation(EVERYTHING | COLORLESS, size=8, channels=1)(images, generator())
    assert views[0].shape == (12, 1, 8, 8)
    assert torch.equal(views[0], expected[0])
    assert torch.equal(views[1], expected[1])


@pytest.mark.parametrize("recipe", some([*NAMES, "everything"], default=("digits_multi_crop", "everything")))
@pytest.mark.parametrize(
    ("channels", "height", "width", "size"), [(3, 16, 16, 16), (1, 12, 20, 8), (3, 20, 12, 24), (5, 20, 12, 16)]
)
def test_the_way_of_a_gpu_makes_the_same_views(monkeypatch, recipe, channels, height, width, size):
    """Both views at once, with matrices made for several batches, on a CPU that stands in for a GPU."""
    views = [EVERYTHING, EVERYTHING | {"blur_prob": 0.0, "pad": 2}]
    if recipe != "everything":
        views = recipe_views(recipe)
    elif size > 8:
        views = [view | FURTHER for view in views]
    if channels not in (1, 3):
        views = [view | COLORLESS for view in views]
    sizes = [5, 4, 4, 7]
    images = random_images(sum(sizes), channels, height, width).split(sizes)
    make = augmentation_of(views, size=size, channels=channels)
    draws, source = generator(), generator()
    expected = [make(batch, source) for batch in images]
    monkeypatch.setattr(devices, "CPU", "none")
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    numbers = sum(size * (height + width + size) for size in make.sizes)
    monkeypatch.setattr(module, "MATRIX_BYTES", 10 * 4 * numbers)  # ten images
    drawn = list(
        make.sample_params(sizes, image_shape=(channels, height, width), device=torch.device("cpu"), generator=draws)
    )
    assert torch.equal(draws.get_state(), source.get_state())
    assert drawn[0].matrices[0].rows._base is drawn[1].matrices[0].rows._base  # 5 + 4 images, then 4, then 7
    assert drawn[1].matrices[0].rows._base is not drawn[2].matrices[0].rows._base
    for batch, of_batch, both in zip(images, drawn, expected, strict=True):
        made = make.apply(batch, of_batch, layout=torch.channels_last)
        for view, other in zip(made, both, strict=True):
            close(view, other)
            assert view.is_contiguous(memory_format=torch.channels_last)


def test_views_drawn_ahead_are_the_same():
    sizes = [5, CHUNK + 3, 4]
    images = random_images(sum(sizes), 3, 16, 16).split(sizes)
    make, source, ahead = augmentation(EVERYTHING, {"flip_prob": 0.5}), generator(), generator()
    drawn = make.sample_params(sizes, image_shape=(3, 16, 16), device=torch.device("cpu"), generator=ahead)
    for batch, of_batch in zip(images, drawn, strict=True):
        for one, other in zip(make(batch, source), make.apply(batch, of_batch), strict=True):
            assert torch.equal(one, other)


def test_global_views_come_first_and_sizes_are_fractions():
    small = {"role": "local", "count": 2, "size": 0.5, "crop_scale": [0.1, 0.4]}
    make = Augmentation(size=16, mean=[0.5], std=[0.5], views=[small, {"count": 2}, {"count": 0}])
    views = make(random_images(3, 1, 16, 16), generator())
    assert [view.role for view in views] == ["global", "global", "local", "local"]
    assert [view.images.shape[-1] for view in views] == [16, 16, 8, 8]
    assert not torch.equal(views[2].images, views[3].images)


def test_a_disabled_recipe_changes_nothing():
    off = {"count": 0, "size": 0.1, "rotation": 10, "hue": 0.5, "mask": {"kind": "random", "patch": 16}}
    images = random_images(3, 1, 16, 16)
    with_it, without = (
        Augmentation(size=16, mean=[0.5], std=[0.5], views=views) for views in ([off, {"count": 2}], [{"count": 2}])
    )
    own, other = generator(), generator()
    for _ in range(2):
        for view, expected in zip(with_it(images, own), without(images, other), strict=True):
            assert torch.equal(view.images, expected.images)


# Settings.


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "augmentation.views has no global view; set role=global in one of its recipes"),
        ([{"role": "local"}], "augmentation.views has no global view"),
        ([{"count": 0}], "augmentation.views has no global view"),
        ([{"count": 1.5}], "augmentation.views.0.count=1.5 must be an integer from 0 to 1024"),
        ([{"size": 0}, {}], "augmentation.views.0.size=0 must be a number above 0 and at most 1"),
        ([{}, {"size": 0.25}], "size=0.25 gives views of 2 pixels; set it to at least 0.5, for views of 4 pixels"),
        ([{"rol": "local"}, {}], "rol is not a setting of a view; use one of: role"),
        ([{"role": "target"}, {}], "augmentation.views.0.role=target must be global or local"),
        ([{"flip_prob": 1.5}, {}], r"augmentation.views.0.flip_prob=1.5 must be"),
        ([{}, {"gray_prob": -0.1}], "augmentation.views.1.gray_prob=-0.1"),
        ([{"hue": 0.6}, {}], "hue=0.6 must be"),
        ([{"brightness": -1}, {}], "brightness=-1"),
        ([{"blur_prob": float("nan")}, {}], "blur_prob=nan"),
        ([{"solarize_prob": "often"}, {}], "solarize_prob=often"),
        ([{"crop_scale": [0.2, 1.2]}, {}], "at most 1"),
        ([{"crop_scale": [0.0, 1.0]}, {}], "above 0"),
        ([{"crop_scale": [0.9, 0.2]}, {}], r"\[low, high\]"),
        ([{"crop_scale": 0.2}, {}], "crop_scale=0.2"),
        ([{"crop_ratio": [0.5]}, {}], "crop_ratio"),
        ([{"blur_sigma": ["a", "b"]}, {}], "blur_sigma"),
        ([{"pad": 1.5}, {}], r"augmentation.views.0.pad=1.5 must be an integer from 0"),
        ([{"pad": True}, {}], "pad=true must be an integer"),
        ([{"pad": -1}, {}], "pad=-1 must be an integer"),
        ([{"transpose_prob": 2}, {}], "transpose_prob=2"),
        ([{"rotation": 190}, {}], "rotation=190 must be at most 180"),
        ([{"gamma": [0, 1]}, {}], r"gamma=\[0, 1\]"),
        ([{"noise_std": 0.1}, {}], "noise_std=0.1"),
        ([{"solarise": 0.5}, {}], "solarise is not a setting of a view; use one of: solarize_prob"),
    ],
)
def test_bad_recipes(views, message):
    with pytest.raises(InputError, match=message):
        Augmentation(size=8, mean=[0.5], std=[0.5], views=views)


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.5, 0.5]), ([0.5], [0.0]), ([], [])])
def test_bad_statistics(mean, std):
    with pytest.raises(InputError, match=r"dataset.mean=.* and dataset.std="):
        Augmentation(size=8, mean=mean, std=std, views=[{}, {}])


ANY_CHANNELS = ("medical", "microscopy", "satellite")
SHAPES = [(3, name) for name in NAMES] + [(channels, name) for channels in (1, 13) for name in ANY_CHANNELS]


@pytest.mark.parametrize(("channels", "recipe"), SHAPES)
def test_recipes_make_views(recipe, channels):
    dataset = {"size": 8, "mean": [0.5] * channels, "std": [0.25] * channels}
    recipe_node = OmegaConf.load(RECIPES / f"{recipe}.yaml")
    node = {"gpu_augmentation": "torch", "dataset": dataset, "encoder": {"patch": 1}, "augmentation": recipe_node}
    config = OmegaConf.create(node)
    images = random_images(4, channels, 8, 8)
    views = instantiate(config.augmentation)(images, generator())
    for view in views:
        size = 8 if view.role == "global" else 4
        assert view.images.shape == (4, channels, size, size)
        assert torch.isfinite(view.images).all()
        assert view.mask is None or view.mask.hidden.shape == (4, 64)
    if len(views) > 1:
        assert torch.equal(views[0].images, views[1].images) == (recipe == "none")


@pytest.mark.parametrize("channels", [2, 4, 13])
def test_colors_of_other_than_three_channels_are_rejected(channels):
    views = [{"hue": 0.1, "brightness": 0.4}, {"count": 3, "gray_prob": 0.2}, {"blur_prob": 1.0}]
    remedy = {"augmentation.views.0.hue": 0, "augmentation.views.1.gray_prob": 0}
    message = (
        f"the images have {channels} channels but hue, gray_prob of views need 3 (RGB); set augmentation=satellite or "
        f"microscopy, or {' '.join(f'{key}=0' for key in remedy)}"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        augmentation_of(views, channels=channels)
    views[0]["hue"] = views[1]["gray_prob"] = 0
    images = random_images(3, channels, 16, 16)
    assert augmentation_of(views, channels=channels)(images, generator())[0].shape == images.shape


def test_colors_of_masked_views_are_rejected_without_a_recipe():
    views = [view | {"count": 1} for view in recipe_views("ibot")]
    with pytest.raises(InputError, match=r"need 3 \(RGB\); set augmentation.views.0.saturation=0 "):
        augmentation_of(views, channels=4)
