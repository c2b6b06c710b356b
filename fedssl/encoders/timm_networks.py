"""Encoders of timm (https://github.com/huggingface/pytorch-image-models), an optional dependency."""

from typing import Any

import timm
from timm.layers.patch_embed import PatchEmbed
from timm.models import is_model_in_modules
from timm.models.convnext import ConvNeXt
from timm.models.efficientnet import EfficientNet
from timm.models.resnet import ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedssl.config.overrides import did_you_mean
from fedssl.encoders.base import Encoder
from fedssl.encoders.library import Parts, build_library_encoder, run_modules
from fedssl.errors import InputError

_ANY_SIZE_VITS = ("vision_transformer", "deit")  # modules of timm whose networks interpolate positions


def build_timm(name: str, *, channels: int, size: int) -> Encoder:
    """Build timm's network of this name without classifier; `InputError` for others, such as names of repositories."""
    architecture, _, tag = name.partition(".")
    if architecture not in timm.list_models():
        raise InputError(
            f"encoder.name={name} is not an architecture of timm {timm.__version__}"
            f"{did_you_mean(name, timm.list_models())}; timm.list_models() lists them"
        )
    if tag:
        raise InputError(
            f"encoder.name={name} names weights ({tag}), which encoder.weights selects; set "
            f"encoder.name={architecture} encoder.weights=timm:{name}"
        )
    return build_library_encoder(
        create, divide, name=name, channels=channels, size=size, fixed_size=_has_fixed_size(name)
    )


def create(name: str, channels: int, size: int) -> nn.Module:
    """Create the network without classifier, with random weights."""
    network: nn.Module = timm.create_model(name, **creation_arguments(name, channels=channels, size=size))
    return network


def creation_arguments(name: str, *, channels: int, size: int) -> dict[str, Any]:
    """Return the arguments of ``timm.create_model`` for images of this shape."""
    arguments: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    if _has_fixed_size(name):
        arguments["img_size"] = size
    if is_model_in_modules(name, _ANY_SIZE_VITS):
        arguments["dynamic_img_size"] = True
    return arguments


def _has_fixed_size(name: str) -> bool:
    config: Any = timm.get_pretrained_cfg(name)
    return bool(config.fixed_input_size)


def divide(network: Any) -> Parts | None:
    """Return the parts of a network of timm, or None if its family is unknown."""
    if isinstance(network, VisionTransformer):
        accepts_any_size = network.dynamic_img_size and isinstance(network.patch_embed, PatchEmbed)
        return Parts(
            stem=_embed,
            stages=tuple(f"blocks.{name}" for name, _ in network.blocks.named_children()),
            head=lambda network, x: network.forward_head(network.norm(x)),
            tail=("norm", "fc_norm", "attn_pool"),
            any_stage=True,
            patch_embedding="patch_embed",
            num_prefix_tokens=network.num_prefix_tokens,
            view_step=network.patch_embed.patch_size[0] if accepts_any_size else None,
        )
    if isinstance(network, ResNet):
        return Parts(
            stem=run_modules("conv1", "bn1", "act1", "maxpool"),
            stages=("layer1", "layer2", "layer3", "layer4"),
            head=lambda network, x: network.forward_head(x),
        )
    if isinstance(network, EfficientNet):
        return Parts(
            stem=run_modules("conv_stem", "bn1"),
            stages=tuple(f"blocks.{name}" for name, _ in network.blocks.named_children()),
            head=lambda network, x: network.forward_head(network.bn2(network.conv_head(x))),
            tail=("conv_head", "bn2"),
        )
    if isinstance(network, ConvNeXt):
        return Parts(
            stem=run_modules("stem"),
            stages=tuple(f"stages.{name}" for name, _ in network.stages.named_children()),
            head=lambda network, x: network.forward_head(network.norm_pre(x)),
            tail=("norm_pre", "head"),
        )
    return None


def _embed(network: Any, images: Tensor) -> Tensor:
    tokens: Tensor = network.norm_pre(network.patch_drop(network._pos_embed(network.patch_embed(images))))
    return tokens
