"""Encoders map images to representations h. Settings and saved encoders name them ``fedssl.encoders.<name>``."""

from fedssl.encoders.base import Encoder
from fedssl.encoders.factory import (
    conv_small,
    resnet18,
    resnet34,
    resnet50,
    timm,
    torchvision,
    vit_base,
    vit_small,
    vit_tiny,
)

__all__ = [
    "Encoder",
    "conv_small",
    "resnet18",
    "resnet34",
    "resnet50",
    "timm",
    "torchvision",
    "vit_base",
    "vit_small",
    "vit_tiny",
]
