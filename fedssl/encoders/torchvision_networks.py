"""Encoders of torchvision: its vision transformer, and all its classification networks without their classifier.

Importing torchvision takes two seconds. Modules that other encoders need do not import it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models
from torchvision.models import VisionTransformer

from fedssl.config.overrides import did_you_mean
from fedssl.encoders.base import Encoder
from fedssl.encoders.library import Parts, build_library_encoder, run_modules
from fedssl.encoders.tokens import (
    TokenEncoder,
    attention,
    gather_patches,
    interpolate_positions,
    sincos_position_embedding,
)
from fedssl.errors import InputError

_CLASSIFIERS = ("fc", "classifier", "heads", "head")  # names of the classifier in torchvision's networks


def build_torchvision(name: str, *, channels: int, size: int) -> Encoder:
    """Build torchvision's classification network of this name without classifier; `InputError` for other names."""
    names = models.list_models(module=models)
    if name not in names:
        raise InputError(
            f"encoder.name={name} is not a classification network of torchvision{did_you_mean(name, names)}; "
            "torchvision.models.list_models(module=torchvision.models) lists them"
        )
    return build_library_encoder(
        create, divide, name=name, channels=channels, size=size, fixed_size=_has_fixed_size(name)
    )


def create(name: str, channels: int, size: int) -> nn.Module:
    """Create the network without classifier, with random weights."""
    network: nn.Module = models.get_model(name, **({"image_size": size} if _has_fixed_size(name) else {}))
    _remove_classifier(network)
    use_fast_attention(network)
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
    if isinstance(network, VisionTransformer):
        return Parts(
            stem=_embed,
            stages=tuple(f"encoder.layers.{name}" for name, _ in network.encoder.layers.named_children()),
            head=lambda network, x: network.encoder.ln(x)[:, 0],
            tail=("encoder.ln",),
            any_stage=True,
            patch_embedding="conv_proj",
            num_prefix_tokens=1,
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


class SelfAttention(nn.MultiheadAttention):
    """Torch's layer with its weights, faster for self-attention on ``(batch, tokens, width)`` without masks."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        self.__dict__.update(vars(layer))  # draws no new weights

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and no weights; calls that are not those of torchvision's blocks are torch's."""
        if need_weights or not query is key is value or key_padding_mask is not None or attn_mask is not None:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        attended = attention(F.linear(query, self.in_proj_weight, self.in_proj_bias), heads=self.num_heads)
        return F.linear(attended, self.out_proj.weight, self.out_proj.bias), None


def use_fast_attention(network: nn.Module) -> None:
    """Replace the attention of torchvision's vision transformers by `SelfAttention`."""
    for path, module in list(network.named_modules()):
        if type(module) is nn.MultiheadAttention and module.batch_first and not module.dropout:
            network.set_submodule(path, SelfAttention(module))


class ViTEncoder(TokenEncoder, VisionTransformer):
    """VisionTransformer of torchvision; its blocks are the stages, the last layer normalization is the tail.

    ``fixed_positions``, 0 for the class token, are neither trained,
    exchanged nor part of the ``state_dict``. Registers are weights after the class token, without position.
    """

    conv_proj: nn.Conv2d
    class_token: nn.Parameter
    register_tokens: nn.Parameter
    encoder: Any
    heads: nn.Module
    patch_embedding = "conv_proj"
    stages_interchangeable = True

    def __init__(
        self,
        *,
        size: int,
        patch: int,
        depth: int,
        heads: int,
        width: int,
        pool: str,
        fixed_positions: bool,
        registers: int = 0,
    ) -> None:
        super().__init__(
            image_size=size, patch_size=patch, num_layers=depth, num_heads=heads, hidden_dim=width, mlp_dim=4 * width
        )
        use_fast_attention(self)
        self.feature_dim = width
        self.image_size = size
        self.heads = nn.Identity()
        self._pooling, self._registers = pool, registers
        self.num_prefix_tokens = registers + (pool == "token")
        if pool == "mean":
            del self.class_token
            self.encoder.pos_embedding = nn.Parameter(self.encoder.pos_embedding.detach()[:, 1:].clone())
        if fixed_positions:
            patches = sincos_position_embedding(size // patch, width)
            positions = torch.zeros_like(self.encoder.pos_embedding)
            positions[0, -len(patches) :] = patches
            del self.encoder.pos_embedding
            self.encoder.register_buffer("pos_embedding", positions.detach(), persistent=False)
        if registers:  # drawn as learned positions, so that they differ from each other
            self.register_tokens = nn.Parameter(torch.empty(1, registers, width).normal_(std=0.02))
        self.define_stages(
            stages=tuple(f"encoder.layers.{name}" for name, _ in self.encoder.layers.named_children()),
            widths=(width,) * depth,
            tail=("encoder.ln",),
        )

    def run_stem(self, images: Tensor) -> Tensor:
        # One addition for all tokens: with two, the gradients of learned positions have other last bits.
        placed: Tensor = self._prepend(self._prefix(), self._patches(images)) + self.positions(self._side(images))
        return placed

    def pool(self, x: Tensor) -> Tensor:
        # h needs no normalization of other tokens than the class token.
        h: Tensor = self.encoder.ln(x[:, 0]) if self._pooling == "token" else self.pool_tokens(self.encoder.ln(x))
        return h

    def positions(self, side: int) -> Tensor:
        """Return the positions of all tokens of an image of ``side x side`` patches.

        They are ``(1, num_prefix_tokens + side^2, width)``. Those of registers are 0.
        """
        stored: Tensor = self.encoder.pos_embedding
        if side == self.grid and not self._registers:
            return stored
        token, patches = stored[:, : -(self.grid**2)], stored[:, -(self.grid**2) :]
        if side != self.grid:
            patches = interpolate_positions(patches, side)
        return torch.cat((token, stored.new_zeros(1, self._registers, self.feature_dim), patches), dim=1)

    def embed(self, images: Tensor, *, hidden: Tensor | None = None, mask_token: Tensor | None = None) -> Tensor:
        self.check_view_shape(images.shape)
        patches = self._patches(images)
        if hidden is not None:
            assert mask_token is not None
            patches = torch.where(hidden[..., None], mask_token, patches)
        return patches + self.positions(self._side(images))[:, self.num_prefix_tokens :]

    def embed_visible(self, images: Tensor, visible: Tensor) -> Tensor:
        self.check_view_shape(images.shape)
        side, patch = self._side(images), self.patch_size
        grid = images.unflatten(3, (side, patch)).unflatten(2, (side, patch))
        pixels = gather_patches(grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), visible)
        if type(self.conv_proj) is nn.Conv2d:  # a third of the time of a convolution of single patches
            tokens = F.linear(pixels, self.conv_proj.weight.flatten(1), self.conv_proj.bias)
        else:  # with LoRA
            tokens = self.conv_proj(pixels.view(-1, images.shape[1], patch, patch)).view(*visible.shape, -1)
        positions = self.positions(side)[:, self.num_prefix_tokens :]
        return tokens + gather_patches(positions.expand(len(images), -1, -1), visible)

    def forward_tokens(self, patches: Tensor) -> Tensor:
        active = self.active_stages
        if active.frozen:
            raise InputError(
                f"{active.frozen} stages of the encoder are frozen, but a masked method trains all stages that run; "
                "set schedule=end_to_end or schedule=progressive, and tuning=full, norm, bias, lora or adapter with "
                "tuning.blocks=null"
            )
        prefix = self._prefix() + self.positions(self.grid)[:, : self.num_prefix_tokens]
        tokens = self._prepend(prefix, patches)
        for number in range(1, active.depth + 1):
            tokens = self.run_stage(number, tokens)
        normalized: Tensor = self.encoder.ln(tokens)
        return normalized

    def pool_tokens(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] if self._pooling == "token" else tokens[:, self.num_prefix_tokens :].mean(dim=1)

    def _side(self, images: Tensor) -> int:
        """Return the number of patches per side of images."""
        return images.shape[-1] // self.patch_size

    def _patches(self, images: Tensor) -> Tensor:
        """Return the tokens of patches without positions, row by row: ``(batch, patches, width)``."""
        patches: Tensor = self.conv_proj(images).flatten(2).transpose(1, 2)
        return patches

    def _prefix(self) -> Tensor:
        """Return the class token and the registers without positions, ``(1, num_prefix_tokens, width)``."""
        tokens: list[Tensor] = [self.class_token] if self._pooling == "token" else []
        tokens += [self.register_tokens] if self._registers else []
        return torch.cat(tokens, dim=1) if tokens else self.encoder.pos_embedding[:, :0]

    def _prepend(self, prefix: Tensor, patches: Tensor) -> Tensor:
        return torch.cat((prefix.expand(patches.shape[0], -1, -1), patches), dim=1) if prefix.shape[1] else patches
