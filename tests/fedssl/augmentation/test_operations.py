"""Each operation against torchvision, one image at a time."""

from statistics import NormalDist

import pytest
import torch
import torchvision.transforms.v2.functional as F
from torchvision.transforms.v2 import InterpolationMode

from fedssl.augmentation import operations
from fedssl.augmentation.recipe import SEEDS
from tests.fedssl.augmentation.made import close, generator, random_images


def tricky_images():
    """Random images, and such with equal channels, black, white and the six pure colors."""
    images = random_images(32, 3, 12, 12)
    images[0] = 77
    images[1, 0] = images[1, 1]
    images[2, 1] = images[2, 2]
    images[3, 0] = images[3, 2]
    images[4:12] = random_images(8, 3, 12, 12, seed=1) // 128 * 255
    images[12:16] //= 64  # dark: small chroma
    return images


def per_image(operation, images, values):
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
    images = tricky_images()
    factors = torch.linspace(0, 2, len(images))
    close(operation(planes(images), factors).transpose(0, 1), per_image(reference, images, factors))


@pytest.mark.parametrize("turns", [-0.5, -1 / 3, -0.07, 0.0, 1 / 6, 0.25, 0.5])
def test_hue_equals_torchvision(turns):
    images = tricky_images()
    actual = operations.hue(planes(images), torch.full((len(images),), turns)).transpose(0, 1)
    close(actual, F.adjust_hue(images / 255, turns))


def test_hue_by_hand():
    # A third of the circle takes red to green; a sixth takes red to yellow (red and green at their largest). The color
    # (0.8, 0.4, 0.2) has M = 0.8, m = 0.2, C = 0.6 and lies 1/3 of a sixth after red; half a circle takes it to 3 1/3
    # sixths: blue is largest (0.8), red smallest (0.2), green 4 - 3 1/3 = 2/3 of C above m: 0.6.
    colors = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0.8, 0.4, 0.2]]).T[:, :, None, None]
    turned = operations.hue(colors, torch.tensor([1 / 3, 1 / 6, 0.5]))[:, :, 0, 0].T
    close(turned, torch.tensor([[0.0, 1, 0], [1.0, 1, 0], [0.2, 0.6, 0.8]]))


def test_solarize_equals_torchvision_where_it_is_on():
    images = tricky_images()
    amount = torch.arange(len(images)) % 2.0
    expected = torch.where(amount[:, None, None, None] == 1, F.solarize(images / 255, 0.5), images / 255)
    close(operations.solarize(planes(images), amount).transpose(0, 1), expected)


@pytest.mark.parametrize(("size", "pad"), [(5, 0), (16, 0), (32, 0), (8, 1), (8, 4), (8, 7)])
def test_crop_flip_and_mirrored_border_equal_torchvision(size, pad):
    # Boxes of 1 to 20 pixels scaled up and down; with a border they reach into it.
    height, width = (8, 12) if pad else (20, 24)
    images, random = random_images(40, 3, height, width), torch.rand(40, 4, generator=generator())
    high, wide = (1 + random[:, 0] * height).floor(), (1 + random[:, 1] * width).floor()
    top = (random[:, 2] * (height + 1 + 2 * pad - high)).floor()
    left = (random[:, 3] * (width + 1 + 2 * pad - wide)).floor()
    flip = torch.arange(40) % 2.0
    rows = operations.crop_weights(top, high, size=height + 2 * pad, out=size)
    columns = operations.crop_weights(left, wide, size=width + 2 * pad, out=size, flip=flip)
    if pad:
        rows, columns = operations.mirror(rows, pad=pad), operations.mirror(columns, pad=pad)
    actual = operations.separable(planes(images), rows=rows, columns=columns).transpose(0, 1)
    for k, box in enumerate(torch.stack([top, left, high, wide], 1).int().tolist()):
        image = F.pad(images[k] / 255, [pad], padding_mode="reflect")
        ways = (True, False) if max(box[2:]) <= size else (True,)  # without antialiasing if nothing is scaled down
        for antialias in ways:
            expected = F.resized_crop(image, *box, [size, size], InterpolationMode.BILINEAR, antialias=antialias)
            close(actual[k], F.horizontal_flip(expected) if flip[k] else expected)


def test_crop_weights_by_hand():
    # Pixels 1 and 2 of 4, drawn out to 4: the centers 0.25, 0.75, 1.25, 1.75 of the new pixels lie between the centers
    # 0.5 and 1.5 of the old ones, or beyond them. Flipped, the rows come in reverse.
    weights = operations.crop_weights(torch.tensor([1.0]), torch.tensor([2.0]), size=4, out=4)[0]
    expected = torch.tensor([[0, 1, 0, 0], [0, 0.75, 0.25, 0], [0, 0.25, 0.75, 0], [0, 0, 1, 0]])
    close(weights, expected)
    flipped = operations.crop_weights(torch.tensor([1.0]), torch.tensor([2.0]), size=4, out=4, flip=torch.ones(1))[0]
    close(flipped, expected.flip(0))


@pytest.mark.parametrize(("size", "radius"), [(16, 6), (8, 3), (8, 7), (5, 0)])
def test_blur_equals_torchvision(size, radius):
    images, sigmas = random_images(12, 3, size, size), torch.linspace(0.1, 3, 12)
    weights = operations.blur_weights(sigmas, size=size, radius=radius)
    actual = operations.separable(planes(images), rows=weights, columns=weights).transpose(0, 1)
    for k, sigma in enumerate(sigmas.tolist()):
        close(actual[k], F.gaussian_blur(images[k] / 255, [2 * radius + 1] * 2, [sigma] * 2))


@pytest.mark.parametrize(("channels", "height", "width", "radius"), [(3, 64, 80, 6), (1, 37, 50, 36), (2, 33, 31, 0)])
@pytest.mark.parametrize("sigma", [1e-4, 0.1, 1.0, 7.0])
def test_blur_of_one_image_equals_torchvision(channels, height, width, radius, sigma):
    image = random_images(channels, height, width) / 255
    expected = F.gaussian_blur(image, [2 * radius + 1] * 2, [max(sigma, 1e-3)] * 2)
    close(operations.blur(image, sigma, radius=radius), expected)


def test_gray_equals_torchvision():
    images = tricky_images()
    actual = operations.saturation(planes(images), torch.zeros(len(images))).transpose(0, 1)
    close(actual, F.rgb_to_grayscale(images / 255, num_output_channels=3))


@pytest.mark.parametrize("channels", [1, 3, 7])
def test_rotation_and_gamma_equal_torchvision(channels):
    images, angles = random_images(6, channels, 9, 9), torch.tensor([0.0, 10, -35, 90, 180, -122])
    rotated = per_image(lambda image, angle: F.rotate(image, angle, InterpolationMode.BILINEAR), images, angles)
    close(operations.rotate(planes(images), angles).transpose(0, 1), rotated)
    exponents = torch.tensor([1.0, 0.5, 2.0, 0.7, 1.5, 4.0])
    close(operations.gamma(planes(images), exponents).transpose(0, 1), per_image(F.adjust_gamma, images, exponents))


def test_gamma_of_negative_values_is_not_nan():
    made = operations.gamma(torch.full((1, 1, 2, 2), -1e-6), torch.tensor([0.7]))
    assert (made == 0).all()


def mixed(x):
    """Return the hash of an integer below 2^32, by Python's integers."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> 15)


def test_noise_is_the_inverse_normal_distribution_of_a_hash():
    images, deviations, seeds = random_images(3, 2, 4, 4), [0.1, 0.0, 0.02], [0, 5, SEEDS - 1]
    made = operations.add_noise(planes(images), torch.tensor(deviations), torch.tensor(seeds).float()).transpose(0, 1)
    for image, deviation, seed, actual in zip(images.double() / 255, deviations, seeds, made, strict=True):
        bits = [mixed(mixed(pixel) ^ mixed(2**31 + seed)) // 2**8 for pixel in range(32)]
        # The middle of one of 2^24 intervals of equal probability.
        normal = [NormalDist().inv_cdf((number + 0.5) / 2**24) for number in bits]
        close(actual, (image + deviation * torch.tensor(normal).view(2, 4, 4)).clamp(0, 1).float())
    assert torch.equal(made[1], planes(images).transpose(0, 1)[1])


def test_noise_is_normal_and_independent():
    # Standard errors: of a mean of n numbers 1 / sqrt(n), of their standard deviation 1 / sqrt(2 n), of the fourth
    # moment sqrt(96 / n), of a correlation 1 / sqrt(n). The largest of m normal numbers is below 5.5 for m < 10^6.
    count, side = 400, 16
    gray = torch.full((3, count, side, side), 0.5, dtype=torch.float64)
    noise = (operations.add_noise(gray, torch.full((count,), 0.05), torch.arange(float(count))) - 0.5) / 0.05
    n = noise.numel()
    assert abs(noise.mean()) < 4 / n**0.5
    assert abs(noise.std() - 1) < 4 / (2 * n) ** 0.5
    assert abs((noise**4).mean() - 3) < 4 * (96 / n) ** 0.5
    by_image = noise.transpose(0, 1).flatten(1)
    for sample in (by_image, by_image.T):
        correlations = torch.corrcoef(sample).fill_diagonal_(0)
        assert correlations.abs().max() < 5.5 / sample.shape[1] ** 0.5
