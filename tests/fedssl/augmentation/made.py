"""Images, and what makes views of them, for tests."""

from pathlib import Path

import torch
import torchvision.transforms.v2.functional as F
from omegaconf import OmegaConf

from fedssl.augmentation import Augmentation

RECIPES = Path(__file__).parents[3] / "conf" / "augmentation"
EVERYTHING = {
    "crop_scale": [0.2, 1.0],
    "flip_prob": 0.5,
    "jitter_prob": 0.8,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "hue": 0.1,
    "gray_prob": 0.2,
    "blur_prob": 0.5,
    "solarize_prob": 0.3,
}
COLORLESS = {"saturation": 0.0, "hue": 0.0, "gray_prob": 0.0}
FURTHER = {"vertical_flip_prob": 0.5, "transpose_prob": 0.5, "rotation": 20}
FURTHER |= {"gamma_prob": 0.7, "noise_prob": 0.5, "noise_std": [0.01, 0.1]}
JITTER = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_images(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8)


class ImagesOfViews(Augmentation):
    """Computes images instead of views."""

    def apply(self, images, params, *, layout=torch.contiguous_format):
        return super().apply(images, params, layout=layout).images


def recipe_views(name):
    """Return the views of a recipe of ``conf/augmentation``, with masks of patches of 1 pixel."""
    config = OmegaConf.create({"encoder": {"patch": 1}, "augmentation": OmegaConf.load(RECIPES / f"{name}.yaml")})
    return [OmegaConf.to_container(view, resolve=True) for view in config.augmentation.views]


def augmentation(first, second=None, **settings):
    return augmentation_of([first, first if second is None else second], **settings)


def statistics(channels):
    """Return a mean and a standard deviation for each channel, which differ between neighbors."""
    return [[values[k % 3] for k in range(channels)] for values in ([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])]


def augmentation_of(views, *, size=16, channels=3):
    mean, std = statistics(channels)
    return ImagesOfViews(size=size, mean=mean, std=std, views=views)


def normalized(images):
    mean, std = (torch.tensor(values)[:, None, None] for values in statistics(images.shape[1]))
    return (images / 255 - mean) / std


def close(actual, expected, *, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
