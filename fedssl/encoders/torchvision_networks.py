"""Encoders of torchvision: all classification networks of ``torchvision.models`` without their classifier."""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from fedssl.config.overrides import did_you_mean
from fedssl.encoders.base import Encoder
from fedssl.encoders.library import Parts, build_library_encoder, run_modules
from fedssl.errors import InputError

_CLASSIFIERS = ("fc", "classifier", "heads", "head")  # names of the classifier in torchvision's networks


def check_name(name: str) -> None:
    """Raise an `InputError` unless torchvision has a classification network of this name."""
    names = models.list_models(module=models)
    if name not in names:
        raise InputError(
            f"encoder.name={name} is not a classification network of torchvision{did_you_mean(name, names)}; "
            "torchvision.models.list_models(module=torchvision.models) lists them"
        )


def build_torchvision(name: str, *, channels: int, size: int) -> Encoder:
    """Build torchvision's network of this name without classifier."""
    check_name(name)
    return build_library_encoder(
        create, divide, name=name, channels=channels, size=size, fixed_size=_has_fixed_size(name)
    )


def create(name: str, channels: int, size: int) -> nn.Module:
    """Create the network without classifier, with random weights."""
    network: nn.Module = models.get_model(name, **({"image_size": size} if _has_fixed_size(name) else {}))
    _remove_classifier(network)
    if channels != 3:
        _replace_first_convolution(network, channels)
    return network


def _has_fixed_size(name: str) -> bool:
    return name.startswith("vit_")


def divide(network: Any) -> Parts | None:
    """Return the parts of a network of torchvision, or None if its family is unknown."""
    if isinstance(network, models.ResNet):
        return Parts(
            stem=run_modules("conv1", "bn1", "relu", "maxpool"),
            stages=("layer1", "layer2", "layer3", "layer4"),
            head=lambda network, x: torch.flatten(network.avgpool(x), 1),
        )
    if isinstance(network, models.EfficientNet):
        last = len(network.features) - 1
        return Parts(
            stem=run_modules("features.0"),
            stages=tuple(f"features.{number}" for number in range(1, last)),
            head=lambda network, x: torch.flatten(network.avgpool(network.features[-1](x)), 1),
            tail=(f"features.{last}",),
        )
    if isinstance(network, models.VisionTransformer):
        return Parts(
            stem=_embed,
            stages=tuple(f"encoder.layers.{name}" for name, _ in network.encoder.layers.named_children()),
            head=lambda network, x: network.encoder.ln(x)[:, 0],
            tail=("encoder.ln",),
            any_stage=True,
            patch_embedding="conv_proj",
        )
    return None


def _embed(network: Any, images: Tensor) -> Tensor:
    patches = network.conv_proj(images).flatten(2).transpose(1, 2)
    tokens = torch.cat((network.class_token.expand(len(images), -1, -1), patches), dim=1)
    placed: Tensor = network.encoder.dropout(tokens + network.encoder.pos_embedding)
    return placed


def _remove_classifier(network: nn.Module) -> None:
    """Replace the last linear layer, and dropout before it, by identities."""
    (name,) = (name for name, _ in network.named_children() if name in _CLASSIFIERS)
    layers = [path for path, _ in network.named_modules() if f"{path}.".startswith(f"{name}.")]
    linear = [path for path in layers if isinstance(network.get_submodule(path), nn.Linear)]
    if not linear:
        raise ValueError("its classifier has no linear layer")
    removed = [*linear[-1:], *(path for path in layers if isinstance(network.get_submodule(path), nn.Dropout))]
    for path in removed:
        network.set_submodule(path, nn.Identity())


def _replace_first_convolution(network: nn.Module, channels: int) -> None:
    path, old = next((path, module) for path, module in network.named_modules() if isinstance(module, nn.Conv2d))
    kernel: Any = {"kernel_size": old.kernel_size, "stride": old.stride, "padding": old.padding}
    network.set_submodule(path, nn.Conv2d(channels, old.out_channels, **kernel, bias=old.bias is not None))
