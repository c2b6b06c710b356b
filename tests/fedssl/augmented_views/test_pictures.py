"""Pictures of images with any channels."""

import io
from base64 import b64decode

import torch
from PIL import Image

from fedssl.augmented_views.cli import Display


def test_bands_are_red_green_and_blue():
    values = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1).expand(3, 2, 2)
    picture = Image.open(io.BytesIO(b64decode(Display((2, 0, 1)).png(values))))
    assert picture.getpixel((1, 1)) == (255, 0, 128)  # 0.5 * 255 = 127.5, rounded to even
