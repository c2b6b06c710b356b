import math
from pathlib import Path

import pytest
import torch
import torchvision.transforms.v2.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop

from fedssl.augmentation import Augmentation, operations
from fedssl.augmentation import augmentation as module
from fedssl.augmentation.augmentation import CHUNK
from fedssl.augmentation.recipe import BOX_UNIFORMS, UNIFORMS, View, crop_boxes, parameters
from fedssl.errors import InputError
from fedssl.machine import devices

RECIPES = Path(__file__).parents[3] / "conf" / "augmentation"
EVERYTHING = {
    "crop_scale": [0.2, 1.0],
    "flip": 0.5,
    "jitter": 0.8,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "hue": 0.1,
    "gray": 0.2,
    "blur": 0.5,
    "solarize": 0.3,
}
JITTER = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8)


def tricky_pictures():
    """Random pictures, and such with equal channels, black, white and the six pure colours."""
    images = pictures(32, 3, 12, 12)
    images[0] = 77
    images[1, 0] = images[1, 1]
    images[2, 1] = images[2, 2]
    images[3, 0] = images[3, 2]
    images[4:12] = pictures(8, 3, 12, 12, seed=1) // 128 * 255
    images[12:16] //= 64  # dark: small chroma
    return images


def augmentation(first, second=None, *, size=16, channels=3):
    views = [first, first if second is None else second]
    return Augmentation(size=size, mean=[0.4, 0.5, 0.6][:channels], std=[0.2, 0.25, 0.3][:channels], views=views)


def normalized(images):
    mean, std = torch.tensor([0.4, 0.5, 0.6])[:, None, None], torch.tensor([0.2, 0.25, 0.3])[:, None, None]
    channels = images.shape[1]
    return (images / 255 - mean[:channels]) / std[:channels]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# Each operation against torchvision, one picture at a time.


def per_picture(operation, images, values):
    return torch.stack([operation(image / 255, float(value)) for image, value in zip(images, values, strict=True)])


def planes(images):
    return (images / 255).transpose(0, 1).contiguous()


@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (operations.brightness, F.adjust_brightness),
        (operations.contrast, F.adjust_contrast),
        (operations.saturation, F.adjust_saturation),
    ],
)
def test_factor_operations_equal_torchvision(operation, reference):
    images = tricky_pictures()
    factors = torch.linspace(0, 2, len(images))
    close(operation(planes(images), factors).transpose(0, 1), per_picture(reference, images, factors))


@pytest.mark.parametrize("turns", [-0.5, -1 / 3, -0.07, 0.0, 1 / 6, 0.25, 0.5])
def test_hue_equals_torchvision(turns):
    images = tricky_pictures()
    actual = operations.hue(planes(images), torch.full((len(images),), turns)).transpose(0, 1)
    close(actual, F.adjust_hue(images / 255, turns))


def test_hue_turns_each_picture_by_its_own_angle():
    images, turns = tricky_pictures(), torch.linspace(-0.5, 0.5, 32)
    close(operations.hue(planes(images), turns).transpose(0, 1), per_picture(F.adjust_hue, images, turns))


def test_hue_by_hand():
    # A third of the circle takes red to green; a sixth takes red to yellow (red and green at their largest). The colour
    # (0.8, 0.4, 0.2) has M = 0.8, m = 0.2, C = 0.6 and lies 1/3 of a sixth after red; half a circle takes it to 3 1/3
    # sixths: blue is largest (0.8), red smallest (0.2), green 4 - 3 1/3 = 2/3 of C above m: 0.6.
    colors = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0.8, 0.4, 0.2]]).T[:, :, None, None]
    turned = operations.hue(colors, torch.tensor([1 / 3, 1 / 6, 0.5]))[:, :, 0, 0].T
    close(turned, torch.tensor([[0.0, 1, 0], [1.0, 1, 0], [0.2, 0.6, 0.8]]))


def test_contrast_of_other_channel_counts():
    # One channel: torchvision's. Two channels (torchvision refuses them): the mean is over both. Means 0.2 and 0.6 give
    # 0.4; a factor of 0.5 takes 0.2 to 0.3 and 0.6 to 0.5.
    images = pictures(6, 1, 8, 8)
    factors = torch.linspace(0, 2, 6)
    close(operations.contrast(planes(images), factors).transpose(0, 1), per_picture(F.adjust_contrast, images, factors))
    two = torch.tensor([0.2, 0.6])[:, None, None, None].expand(2, 1, 4, 4)
    close(operations.contrast(two, torch.tensor([0.5]))[:, 0, 0, 0], torch.tensor([0.3, 0.5]))


def test_gray_equals_torchvision():
    images = tricky_pictures()
    actual = operations.saturation(planes(images), torch.zeros(len(images))).transpose(0, 1)
    close(actual, F.rgb_to_grayscale(images / 255, num_output_channels=3))


def test_solarize_equals_torchvision_where_it_is_on():
    images = tricky_pictures()
    amount = torch.arange(len(images)) % 2.0
    expected = torch.where(amount[:, None, None, None] == 1, F.solarize(images / 255, 0.5), images / 255)
    close(operations.solarize(planes(images), amount).transpose(0, 1), expected)


@pytest.mark.parametrize("size", [5, 16, 32])
def test_crop_and_flip_equal_torchvision(size):
    # Boxes of 1 to 20 pixels scaled up and down.
    images = pictures(40, 3, 20, 24)
    random = torch.rand(40, 4, generator=generator())
    height, width = (1 + random[:, 0] * 20).floor(), (1 + random[:, 1] * 24).floor()
    top, left = (random[:, 2] * (21 - height)).floor(), (random[:, 3] * (25 - width)).floor()
    flip = torch.arange(40) % 2.0
    rows = operations.crop_weights(top, height, size=20, out=size)
    columns = operations.crop_weights(left, width, size=24, out=size, flip=flip)
    actual = operations.separable(planes(images), rows=rows, columns=columns).transpose(0, 1)
    boxes = torch.stack([top, left, height, width], 1).int().tolist()
    for k, box in enumerate(boxes):
        expected = F.resized_crop(images[k] / 255, *box, [size, size])
        close(actual[k], F.horizontal_flip(expected) if flip[k] else expected)
        if max(box[2:]) <= size:  # nothing is scaled down
            expected = F.resized_crop(images[k] / 255, *box, [size, size], InterpolationMode.BILINEAR, antialias=False)
            close(actual[k], F.horizontal_flip(expected) if flip[k] else expected)


@pytest.mark.parametrize("pad", [1, 4, 7])
def test_crops_that_reach_into_the_border_equal_torchvision(pad):
    images = pictures(40, 3, 8, 12)
    random = torch.rand(40, 4, generator=generator())
    height, width = (1 + random[:, 0] * 8).floor(), (1 + random[:, 1] * 12).floor()
    top, left = (random[:, 2] * (9 + 2 * pad - height)).floor(), (random[:, 3] * (13 + 2 * pad - width)).floor()
    flip = torch.arange(40) % 2.0
    rows = operations.crop_weights(top, height, size=8 + 2 * pad, out=8)
    columns = operations.crop_weights(left, width, size=12 + 2 * pad, out=8, flip=flip)
    rows, columns = operations.mirror(rows, pad=pad), operations.mirror(columns, pad=pad)
    actual = operations.separable(planes(images), rows=rows, columns=columns).transpose(0, 1)
    for k, box in enumerate(torch.stack([top, left, height, width], 1).int().tolist()):
        expected = F.resized_crop(F.pad(images[k] / 255, [pad], padding_mode="reflect"), *box, [8, 8])
        close(actual[k], F.horizontal_flip(expected) if flip[k] else expected)


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (1.0, 1.0)])
def test_with_a_border_a_picture_moves_as_by_a_random_crop(ratio):
    """Every one of 9 x 9 places with the same probability, as by torchvision's RandomCrop of a padded picture."""
    uniform = torch.rand(8100, BOX_UNIFORMS, generator=generator(), dtype=torch.float64)
    top, left, height, width = crop_boxes(uniform, height=32, width=32, scale=(1.0, 1.0), ratio=ratio, pad=4)
    assert {*height.tolist(), *width.tolist()} == {32}
    counts = torch.zeros(9, 9).index_put((top.long() + 4, left.long() + 4), torch.tensor(1.0), accumulate=True)
    # Poisson with mean 100: the most and the least of 81 places are within 4.5 standard deviations of 10.
    assert counts.min() > 55
    assert counts.max() < 145


def test_a_fedx_view_is_the_picture_moved_and_perhaps_flipped():
    images = pictures(20, 3, 32, 32)
    recipe = OmegaConf.to_container(OmegaConf.load(RECIPES / "fedx.yaml").views[0])
    views = augmentation(recipe, size=32)(images, generator())
    padded = F.pad(images.float(), [4], padding_mode="reflect")
    places = set()
    for view in views:
        for k, picture in enumerate(view):
            moved = [F.crop(padded[k], top, left, 32, 32) for top in range(9) for left in range(9)]
            candidates = normalized(torch.stack([*moved, *map(F.horizontal_flip, moved)]))
            equal = (candidates - picture).abs().amax((1, 2, 3)) < 1e-4
            assert equal.sum() == 1
            places.add(int(equal.byte().argmax()))
    assert len(places) > 30
    assert {place < 81 for place in places} == {True, False}


def test_crop_weights_by_hand():
    # Pixels 1 and 2 of 4, drawn out to 4: the centres 0.25, 0.75, 1.25, 1.75 of the new pixels lie between the centres
    # 0.5 and 1.5 of the old ones, or beyond them. Flipped, the rows come in reverse.
    weights = operations.crop_weights(torch.tensor([1.0]), torch.tensor([2.0]), size=4, out=4)[0]
    expected = torch.tensor([[0, 1, 0, 0], [0, 0.75, 0.25, 0], [0, 0.25, 0.75, 0], [0, 0, 1, 0]])
    close(weights, expected)
    flipped = operations.crop_weights(torch.tensor([1.0]), torch.tensor([2.0]), size=4, out=4, flip=torch.ones(1))[0]
    close(flipped, expected.flip(0))


@pytest.mark.parametrize(("size", "radius"), [(16, 6), (8, 3), (8, 7), (5, 0)])
def test_blur_equals_torchvision(size, radius):
    images, sigmas = pictures(12, 3, size, size), torch.linspace(0.1, 3, 12)
    weights = operations.blur_weights(sigmas, size=size, radius=radius)
    actual = operations.separable(planes(images), rows=weights, columns=weights).transpose(0, 1)
    for k, sigma in enumerate(sigmas.tolist()):
        close(actual[k], F.gaussian_blur(images[k] / 255, [2 * radius + 1] * 2, [sigma] * 2))


def test_blur_of_sigma_zero_is_exactly_nothing():
    assert torch.equal(operations.blur_weights(torch.zeros(2), size=8, radius=5), torch.eye(8).expand(2, 8, 8))


# The random laws.


def kolmogorov_distance(first, second):
    values = torch.cat([first, second]).unique()
    shares = [torch.searchsorted(sample.sort().values, values, right=True) / len(sample) for sample in (first, second)]
    return float((shares[0] - shares[1]).abs().max())


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [(32, 32, (0.08, 1.0), (3 / 4, 4 / 3)), (24, 40, (0.5, 1.0), (3 / 4, 4 / 3)), (8, 8, (0.25, 1.0), (1 / 2, 2.0))],
)
def test_crop_boxes_have_the_law_of_torchvision(height, width, scale, ratio):
    count = 4000
    torch.manual_seed(0)  # torchvision draws from the global generator
    transform = RandomResizedCrop(8, scale, ratio)
    image = torch.zeros(1, height, width)
    drawn = [transform.make_params([image]) for _ in range(count)]
    reference = {name: torch.tensor([float(box[name]) for box in drawn]) for name in ("top", "left", "height", "width")}
    uniform = torch.rand(count, BOX_UNIFORMS, generator=generator(), dtype=torch.float64)
    top, left, box_height, box_width = crop_boxes(uniform, height=height, width=width, scale=scale, ratio=ratio)
    own = {"top": top, "left": left, "height": box_height, "width": box_width}
    for boxes in (own, reference):
        boxes["area"], boxes["ratio"] = boxes["height"] * boxes["width"], boxes["width"] / boxes["height"]
    # Two samples of one law are further apart once in ten thousand times; another scale of 0.2 gives 0.1 and more.
    limit = math.sqrt(-math.log(1e-4 / 2) / count)
    for name, values in reference.items():
        assert kolmogorov_distance(own[name].float(), values) < limit, name


@pytest.mark.parametrize(("height", "width"), [(8, 40), (40, 8), (9, 32)])
def test_crop_boxes_fall_back_to_the_centre_as_torchvision_does(height, width):
    # The whole area of so long a picture fits no allowed ratio.
    image = torch.zeros(1, height, width)
    box = RandomResizedCrop(8, (1.0, 1.0)).make_params([image])
    uniform = torch.rand(5, BOX_UNIFORMS, generator=generator(), dtype=torch.float64)
    boxes = crop_boxes(uniform, height=height, width=width, scale=(1.0, 1.0), ratio=(3 / 4, 4 / 3))
    assert torch.stack(boxes, 1).tolist() == [[box["top"], box["left"], box["height"], box["width"]]] * 5


def test_crop_boxes_by_hand():
    # 10x10 pixels. The first candidate has area 100 and ratio exp(log 4) = 4: 20 wide, too wide. The second has area
    # 25 + 75 / 3 = 50 and ratio exp(log 1/4 + log 16 * 3/4) = 2: 10 wide, 5 high. Of the 6 places from above,
    # 0.4 * 6 = 2.4 gives 2; from the left there is one.
    uniform = torch.full((1, BOX_UNIFORMS), 0.9, dtype=torch.float64)
    uniform[0, :2] = torch.tensor([1.0, 1 / 3])
    uniform[0, 10:12] = torch.tensor([1.0, 3 / 4])
    uniform[0, -2:] = torch.tensor([0.4, 0.9])
    boxes = crop_boxes(uniform, height=10, width=10, scale=(0.25, 1.0), ratio=(1 / 4, 4.0))
    assert [float(value) for value in boxes] == [2, 0, 5, 10]


def test_parameters_have_their_probabilities_and_ranges():
    count = 20_000
    uniform = torch.rand(count, UNIFORMS, generator=generator(), dtype=torch.float64)
    view = View(**{**EVERYTHING, "brightness": 1.5, "blur_sigma": [0.5, 1.5]})
    drawn = parameters(view, uniform, height=32, width=32)
    shares = {
        "flip": (drawn.flip.double(), 0.5),
        "contrast": ((drawn.contrast != 1).double(), 0.8),
        "color": ((drawn.color == 0).double(), 0.2),
        "sigma": ((drawn.sigma > 0).double(), 0.5),
        "solarize": (drawn.solarize.double(), 0.3),
    }
    for name, (happened, probability) in shares.items():
        error = math.sqrt(probability * (1 - probability) / count)
        assert abs(float(happened.mean()) - probability) < 4 * error, name
    jittered = drawn.contrast != 1
    ranges = {  # of uniform numbers: mean in the middle, reaching both ends
        "brightness": (drawn.brightness[jittered], 0, 2.5),
        "contrast": (drawn.contrast[jittered], 0.6, 1.4),
        "saturation": (drawn.saturation[jittered], 0.6, 1.4),
        "hue": (drawn.hue[jittered], -0.1, 0.1),
        "sigma": (drawn.sigma[drawn.sigma > 0], 0.5, 1.5),
    }
    for name, (values, low, high) in ranges.items():
        assert low <= values.min() < low + 0.01 * (high - low), name
        assert high >= values.max() > high - 0.01 * (high - low), name
        assert abs(float(values.mean()) - (low + high) / 2) < 0.01 * (high - low), name
    assert (drawn.brightness[~jittered] == 1).all()
    assert (drawn.hue[~jittered] == 0).all()


def test_parameters_are_independent_of_each_other():
    count = 20_000
    uniform = torch.rand(count, UNIFORMS, generator=generator(), dtype=torch.float64)
    view = View(**{**EVERYTHING, "jitter": 1.0, "blur": 1.0})
    drawn = parameters(view, uniform, height=32, width=32)._asdict()
    names = ("height", "flip", "brightness", "contrast", "saturation", "hue", "color", "sigma", "solarize")
    correlation = torch.corrcoef(torch.stack([drawn[name].double() for name in names])) - torch.eye(len(names))
    assert correlation.abs().max() < 4.5 / math.sqrt(count)


def test_a_setting_does_not_shift_the_draws_of_the_others():
    uniform = torch.rand(50, UNIFORMS, generator=generator(), dtype=torch.float64)
    with_flip = parameters(View(**EVERYTHING), uniform, height=16, width=16)._asdict()
    without = parameters(View(**{**EVERYTHING, "flip": 0.0}), uniform, height=16, width=16)._asdict()
    assert with_flip.pop("flip").any()
    assert not without.pop("flip").any()
    assert all(torch.equal(with_flip[name], without[name]) for name in without)


# Whole batches.


def test_views_equal_a_torchvision_pipeline_with_the_same_parameters():
    images = pictures(40, 3, 20, 20)
    actual = augmentation(EVERYTHING, {**EVERYTHING, "blur": 0.0})(images, generator(3))
    source = generator(3)
    orders = [torch.randperm(4, generator=source).tolist() for _ in range(2)]
    uniform = torch.rand(40, 2, UNIFORMS, generator=source, dtype=torch.float64)
    for index, blur in enumerate((0.5, 0.0)):
        drawn = parameters(View(**{**EVERYTHING, "blur": blur}), uniform[:, index], height=20, width=20)
        for k in range(40):
            one = {name: float(values[k]) for name, values in drawn._asdict().items()}
            box = [int(one[name]) for name in ("top", "left", "height", "width")]
            image = F.resized_crop(images[k] / 255, *box, [16, 16])
            image = F.horizontal_flip(image) if one["flip"] else image
            factors = [one["brightness"], one["contrast"], one["saturation"], one["hue"]]
            for step in orders[index]:
                image = JITTER[step](image, factors[step])
            image = image if one["color"] else F.rgb_to_grayscale(image, 3)
            image = F.gaussian_blur(image, [13, 13], [one["sigma"]] * 2) if one["sigma"] else image
            image = F.solarize(image, 0.5) if one["solarize"] else image
            close(0.2 * actual[index][k], 0.2 * normalized(255 * image[None])[0])  # 0.2: the smallest std


def test_neutral_recipe_only_normalises():
    images = pictures(7, 3, 16, 16)
    first, second = augmentation({})(images, generator())
    close(first, normalized(images))
    assert torch.equal(first, second)
    assert first.dtype == torch.float32
    assert first.is_contiguous()


def test_same_seed_same_views_and_global_generator_untouched():
    images, state = pictures(9, 3, 16, 16), torch.get_rng_state()
    make = augmentation(EVERYTHING)
    first, again, other = (make(images, generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.allclose(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_views_go_on_with_the_generator():
    images, source, make = pictures(9, 3, 16, 16), generator(), augmentation(EVERYTHING)
    assert not torch.allclose(make(images, source)[0], make(images, source)[0])


@pytest.mark.parametrize("setting", [{"crop_scale": [0.2, 0.9]}, {"brightness": 0.5}, {"contrast": 0.5}, {"hue": 0.3}])
def test_every_picture_and_view_has_its_own_parameters(setting):
    copies = pictures(1, 3, 16, 16).expand(20, 3, 16, 16)
    both = torch.cat(augmentation(setting)(copies, generator()))
    distance = torch.cdist(both.flatten(1), both.flatten(1)) + 100 * torch.eye(40)
    assert distance.min() > 1e-3


def test_a_picture_gets_the_same_views_in_a_longer_batch():
    images = pictures(2 * CHUNK + 30, 3, 16, 16)
    make = augmentation(EVERYTHING)
    whole, short = make(images, generator()), make(images[: CHUNK + 5], generator())
    assert len(whole[0]) == len(images)
    for long, view in zip(whole, short, strict=True):
        close(long[: CHUNK + 5], view)


@pytest.mark.parametrize("channels", [1, 2])
def test_color_operations_need_three_channels(channels):
    images = pictures(12, channels, 8, 8)
    colorless = {**EVERYTHING, "saturation": 0.0, "hue": 0.0, "gray": 0.0}
    views = augmentation(EVERYTHING, size=8, channels=channels)(images, generator())
    expected = augmentation(colorless, size=8, channels=channels)(images, generator())
    assert views[0].shape == (12, channels, 8, 8)
    assert torch.equal(views[0], expected[0])
    assert torch.equal(views[1], expected[1])


def test_pictures_are_not_changed():
    images = pictures(5, 3, 16, 16)
    before = images.clone()
    augmentation(EVERYTHING)(images, generator())
    assert torch.equal(images, before)


@pytest.mark.parametrize("recipe", [*sorted(path.stem for path in RECIPES.glob("*.yaml")), "everything"])
@pytest.mark.parametrize(("channels", "height", "width", "size"), [(3, 16, 16, 16), (1, 12, 20, 8), (3, 20, 12, 24)])
def test_the_way_of_a_gpu_makes_the_same_views(monkeypatch, recipe, channels, height, width, size):
    """Both views at once, with matrices made for several batches, on a CPU that stands in for a GPU."""
    views = [EVERYTHING, EVERYTHING | {"blur": 0.0, "pad": 2}]
    if recipe != "everything":
        views = OmegaConf.to_container(OmegaConf.load(RECIPES / f"{recipe}.yaml").views)
    sizes = [5, 4, 4, 7]
    images = pictures(sum(sizes), channels, height, width).split(sizes)
    make = augmentation(*views, size=size, channels=channels)
    draws, source = generator(), generator()
    expected = [make(batch, source) for batch in images]
    monkeypatch.setattr(devices, "GPU", "cpu")
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(module, "MATRICES", 10 * 8 * size * (height + width + size))  # ten pictures
    drawn = list(make.draw(sizes, form=(channels, height, width), device=torch.device("cpu"), generator=draws))
    assert torch.equal(draws.get_state(), source.get_state())
    assert drawn[0].matrices[0].rows._base is drawn[1].matrices[0].rows._base  # 5 + 4 pictures, then 4, then 7
    assert drawn[1].matrices[0].rows._base is not drawn[2].matrices[0].rows._base
    for batch, of_batch, both in zip(images, drawn, expected, strict=True):
        made = make.make(batch, of_batch, layout=torch.channels_last)
        for view, other in zip(made, both, strict=True):
            close(view, other)
            assert view.is_contiguous(memory_format=torch.channels_last)


def test_drawn_ahead_or_one_after_the_other_views_are_the_same():
    sizes = [5, CHUNK + 3, 4]
    images = pictures(sum(sizes), 3, 16, 16).split(sizes)
    make, source, ahead = augmentation(EVERYTHING, {"flip": 0.5}), generator(), generator()
    drawn = make.draw(sizes, form=(3, 16, 16), device=torch.device("cpu"), generator=ahead)
    for batch, of_batch in zip(images, drawn, strict=True):
        for one, other in zip(make(batch, source), make.make(batch, of_batch), strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_makes_the_same_views_as_the_cpu():
    images = pictures(2 * CHUNK + 30, 3, 16, 16)
    make = augmentation({**EVERYTHING, "solarize": 0.0})
    on_cpu = make(images, generator())
    for cpu, cuda in zip(on_cpu, make(images.cuda(), generator()), strict=True):
        assert cuda.is_cuda
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=0, atol=1e-4)


# Settings.


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([{}], "augmentation.views has 1 recipes; give exactly two"),
        ([{}, {}, {}], "3 recipes"),
        ([{"flip": 1.5}, {}], r"augmentation.views.0.flip=1.5 .* at least 0 and at most 1"),
        ([{}, {"gray": -0.1}], "augmentation.views.1.gray=-0.1"),
        ([{"hue": 0.6}, {}], "at most 0.5"),
        ([{"brightness": -1}, {}], "brightness=-1"),
        ([{"blur": float("nan")}, {}], "blur=nan"),
        ([{"solarize": "often"}, {}], "solarize=often"),
        ([{"crop_scale": [0.2, 1.2]}, {}], "at most 1"),
        ([{"crop_scale": [0.0, 1.0]}, {}], "above 0"),
        ([{"crop_scale": [0.9, 0.2]}, {}], r"\[low, high\]"),
        ([{"crop_scale": 0.2}, {}], "crop_scale=0.2"),
        ([{"crop_ratio": [0.5]}, {}], "crop_ratio"),
        ([{"blur_sigma": ["a", "b"]}, {}], "blur_sigma"),
        ([{"pad": 1.5}, {}], r"augmentation.views.0.pad=1.5 is no number of pixels; set it to a whole number of at"),
        ([{"pad": True}, {}], "pad=True is no number of pixels"),
        ([{"pad": -1}, {}], "pad=-1 is out of range"),
        ([{"solarise": 0.5}, {}], "solarise is no setting of a view; use one of: solarize"),
    ],
)
def test_bad_recipes(views, message):
    with pytest.raises(InputError, match=message):
        Augmentation(size=8, mean=[0.5], std=[0.5], views=views)


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.5, 0.5]), ([0.5], [0.0]), ([], [])])
def test_bad_statistics(mean, std):
    with pytest.raises(InputError, match=r"dataset.mean=.* and dataset.std="):
        Augmentation(size=8, mean=mean, std=std, views=[{}, {}])


def test_wrong_number_of_channels():
    with pytest.raises(InputError, match="the pictures have 3 channels but dataset.mean has 1 numbers"):
        augmentation({}, channels=1)(pictures(4, 3, 16, 16), generator())


def test_a_border_is_narrower_than_the_picture():
    with pytest.raises(InputError, match="pad=16 but the pictures have 16x20 pixels, which mirror at most 15; set pad"):
        augmentation({}, {"pad": 16}, channels=3)(pictures(4, 3, 16, 20), generator())


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
@pytest.mark.parametrize("channels", [1, 3])
def test_recipes_make_views(recipe, channels):
    dataset = {"size": 8, "mean": [0.5] * channels, "std": [0.25] * channels}
    config = OmegaConf.create(
        {"gpu_views": "torch", "dataset": dataset, "augmentation": OmegaConf.load(RECIPES / f"{recipe}.yaml")}
    )
    images = pictures(4, channels, 8, 8)
    first, second = instantiate(config.augmentation)(images, generator())
    assert first.shape == second.shape == (4, channels, 8, 8)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second) == (recipe == "none")
