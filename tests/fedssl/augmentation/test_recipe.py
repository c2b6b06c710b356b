"""What is drawn for a view: its law, its ranges, and that draws do not depend on each other."""

import math

import pytest
import torch
from torchvision.transforms.v2 import RandomResizedCrop

from fedssl.augmentation.recipe import (
    BOX_UNIFORMS,
    FURTHER_UNIFORMS,
    SEEDS,
    UNIFORMS,
    ViewOptions,
    crop_boxes,
    parameters,
)
from tests.fedssl.augmentation.made import EVERYTHING, FURTHER, generator

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
    # The whole area of so long an image fits no allowed ratio.
    image = torch.zeros(1, height, width)
    box = RandomResizedCrop(8, (1.0, 1.0)).make_params([image])
    uniform = torch.rand(5, BOX_UNIFORMS, generator=generator(), dtype=torch.float64)
    boxes = crop_boxes(uniform, height=height, width=width, scale=(1.0, 1.0), ratio=(3 / 4, 4 / 3))
    assert torch.stack(boxes, 1).tolist() == [[box["top"], box["left"], box["height"], box["width"]]] * 5


def check_law(count, shares, ranges):
    """Compare shares of events with their probabilities, and uniform numbers with both ends and the middle."""
    for name, (happened, probability) in shares.items():
        error = math.sqrt(probability * (1 - probability) / count)
        assert abs(float(happened.double().mean()) - probability) < 4 * error, name
    for name, (values, low, high) in ranges.items():
        assert low <= values.min() < low + 0.01 * (high - low), name
        assert high >= values.max() > high - 0.01 * (high - low), name
        assert abs(float(values.mean()) - (low + high) / 2) < 0.01 * (high - low), name


def test_parameters_have_their_probabilities_and_ranges():
    count = 20_000
    uniform = torch.rand(count, UNIFORMS, generator=generator(), dtype=torch.float64)
    view = ViewOptions(**{**EVERYTHING, "brightness": 1.5, "blur_sigma": [0.5, 1.5]})
    drawn = parameters(view, uniform, height=32, width=32)
    shares = {
        "flip": (drawn.flip, 0.5),
        "contrast": (drawn.contrast != 1, 0.8),
        "color": (drawn.color == 0, 0.2),
        "sigma": (drawn.sigma > 0, 0.5),
        "solarize": (drawn.solarize, 0.3),
    }
    jittered = drawn.contrast != 1
    ranges = {
        "brightness": (drawn.brightness[jittered], 0, 2.5),
        "contrast": (drawn.contrast[jittered], 0.6, 1.4),
        "saturation": (drawn.saturation[jittered], 0.6, 1.4),
        "hue": (drawn.hue[jittered], -0.1, 0.1),
        "sigma": (drawn.sigma[drawn.sigma > 0], 0.5, 1.5),
    }
    check_law(count, shares, ranges)
    assert (drawn.brightness[~jittered] == 1).all()
    assert (drawn.hue[~jittered] == 0).all()


def test_a_setting_does_not_shift_the_draws_of_the_others():
    uniform = torch.rand(50, UNIFORMS, generator=generator(), dtype=torch.float64)
    with_flip = parameters(ViewOptions(**EVERYTHING), uniform, height=16, width=16)._asdict()
    without = parameters(ViewOptions(**{**EVERYTHING, "flip_prob": 0.0}), uniform, height=16, width=16)._asdict()
    assert with_flip.pop("flip").any()
    assert not without.pop("flip").any()
    assert all(torch.equal(with_flip[name], without[name]) for name in without)


def test_further_parameters_have_their_probabilities_and_ranges():
    count = 20_000
    uniform = torch.rand(count, UNIFORMS + FURTHER_UNIFORMS, generator=generator(), dtype=torch.float64)
    view = ViewOptions(**{**FURTHER, "transpose_prob": 0.25, "gamma": [0.5, 2.0]})
    drawn = parameters(view, uniform, height=32, width=32)
    changed = {"vertical": (0, 0.5), "transpose": (0, 0.25), "gamma": (1, 0.7), "noise": (0, 0.5)}
    shares = {name: (drawn._asdict()[name] != neutral, share) for name, (neutral, share) in changed.items()}
    ranges = {  # half and twice the exponent are equally probable
        "angle": (drawn.angle, -20, 20),
        "gamma": (drawn.gamma[drawn.gamma != 1].log2(), -1, 1),
        "noise": (drawn.noise[drawn.noise > 0], 0.01, 0.1),
        "seed": (drawn.seed / SEEDS, 0, 1),
    }
    check_law(count, shares, ranges)
    assert (drawn.seed.float() == drawn.seed).all()
    assert (drawn.seed % 1 == 0).all()


def test_further_settings_do_not_shift_other_draws():
    uniform = torch.rand(50, UNIFORMS + FURTHER_UNIFORMS, generator=generator(), dtype=torch.float64)
    usual = parameters(ViewOptions(**EVERYTHING), uniform[:, :UNIFORMS], height=16, width=16)._asdict()
    further = parameters(ViewOptions(**EVERYTHING, **FURTHER), uniform, height=16, width=16)._asdict()
    changed = {name for name, values in usual.items() if not torch.equal(values, further[name])}
    assert changed == {"vertical", "transpose", "angle", "gamma", "noise", "seed"}
    neutral = {"vertical": 0, "transpose": 0, "angle": 0, "gamma": 1, "noise": 0}
    assert all((usual[name] == value).all() for name, value in neutral.items())
