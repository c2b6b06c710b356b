"""Layers with LoRA (Hu et al., arXiv 2106.09685): the weight W ``(m, n)`` is frozen, and W + scale B A is applied.

A is ``(r, n)`` and B ``(m, r)``. A convolution has the matrix of its kernel, ``n = in_channels / groups * height *
width``. Linear layers apply A and B one after the other. Convolutions add the product to the kernel in each step, which
is small compared with their feature maps: on a CPU a step with EfficientNet-Lite0 takes 0.8 times as long, and 0.2
times with factors of its depthwise convolutions. The parameters W and the bias keep their names and are those of the
layer that a LoRA layer replaces.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoRALinear(nn.Linear):
    """Linear layer with LoRA of rank r."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter | None  # None after `merge`

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float) -> None:
        _take_over(self, layer)
        _add_factors(self, layer.weight, rank=rank)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        return y if self.lora_B is None else y + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


class LoRAConv2d(nn.Conv2d):
    """Convolution with LoRA of rank r."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter | None

    def __init__(self, layer: nn.Conv2d, *, rank: int, scale: float) -> None:
        _take_over(self, layer)
        _add_factors(self, layer.weight, rank=rank)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        if self.lora_B is None:
            return super().forward(input)
        product = self.scale * (self.lora_B @ self.lora_A)
        y: Tensor = self._conv_forward(input, self.weight + product.view_as(self.weight), self.bias)
        return y


class LoRAAttention(nn.Module):
    """Self-attention of `torch.nn.MultiheadAttention`, with ``batch_first``, whose projections can have LoRA.

    ``rank`` is that of the input projection, whose weight is ``in_proj_weight``; 0: none. ``out_proj`` is a layer of
    its own.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter | None

    def __init__(self, attention: nn.MultiheadAttention, *, rank: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.scale = attention.num_heads, scale
        self.in_proj_weight, self.in_proj_bias = attention.in_proj_weight, attention.in_proj_bias
        _add_factors(self, attention.in_proj_weight, rank=rank)
        self.out_proj: nn.Linear = attention.out_proj

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        """Return the output for tokens ``(batch, tokens, width)``, which are query, key and value, and no weights."""
        x = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        if self.lora_B is not None:
            x = x + self.scale * F.linear(F.linear(query, self.lora_A), self.lora_B)
        q, k, v = x.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(heads.transpose(1, 2).flatten(2)), None


LoRALayer = LoRALinear | LoRAConv2d | LoRAAttention


def weight_name(layer: LoRALayer) -> str:
    """Return the name of the weight that the layer's factors belong to."""
    return "in_proj_weight" if isinstance(layer, LoRAAttention) else "weight"


@torch.no_grad()
def merge(layer: LoRALayer) -> None:
    """Add the product to the weight, and remove the factors."""
    if layer.lora_B is None:
        return
    weight: Tensor = layer.get_parameter(weight_name(layer))
    product = layer.scale * (layer.lora_B.double() @ layer.lora_A.double())
    merged = (weight.double() + product.view_as(weight)).to(weight.dtype)
    layer.register_parameter(weight_name(layer), nn.Parameter(merged.contiguous()))
    for name in ("lora_A", "lora_B"):
        layer.register_parameter(name, None)


def _take_over(layer: nn.Module, plain: nn.Module) -> None:
    """Give a new layer the settings and the parameters of the one that it replaces."""
    nn.Module.__init__(layer)
    layer.__dict__.update({**vars(plain), "_parameters": dict(plain._parameters)})


def _add_factors(layer: nn.Module, weight: Tensor, *, rank: int) -> None:
    """Add A, drawn as the weights of `torch.nn.Linear`, and B = 0, so that the output stays the same; rank 0: none."""
    factors: dict[str, nn.Parameter | None] = {"lora_A": None, "lora_B": None}
    if rank:
        a = weight.new_empty(rank, weight[0].numel())
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        factors = {"lora_A": nn.Parameter(a), "lora_B": nn.Parameter(weight.new_zeros(len(weight), rank))}
    for name, factor in factors.items():
        layer.register_parameter(name, factor)
