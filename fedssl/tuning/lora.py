"""LoRA (Hu et al., arXiv 2106.09685): the weight W ``(m, n)`` of a layer is frozen, and W + scale B A is applied.

A is ``(r, n)`` and B ``(m, r)``. A convolution has the matrix of its kernel, ``n = in_channels / groups * height *
width``. Linear layers apply A and B one after the other. Convolutions add the product to the kernel in each step, which
is small compared with their feature maps: on a CPU a step with EfficientNet-Lite0 takes 0.8 times as long, and 0.2
times with factors of its depthwise convolutions. The parameters W and the bias keep their names and are those of the
layer that a LoRA layer replaces.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config.constraints import check_arguments
from fedssl.config.overrides import did_you_mean
from fedssl.encoders.base import Encoder, Network
from fedssl.encoders.tokens import attention
from fedssl.errors import InputError, shortened
from fedssl.low_rank_products import LowRankLayer

IN_PROJ = "in_proj"  # name of the input projection of an attention


class _LoRA(nn.Module):
    """A layer with LoRA of rank r, whose ``weight`` has the product added; the parameter of this name is W.

    Some networks do not call the layer, but a function with its weight: Swin, BEiT and EVA in their attention.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter | None  # None after `merge`
    scale: float

    def __init__(self, layer: nn.Linear | nn.Conv2d, *, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.__dict__.update({**vars(layer), "_parameters": dict(layer._parameters)})
        _add_factors(self, layer.weight, rank=rank)
        self.scale = scale

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name != "weight" or self.lora_B is None:
            return value
        return value + (self.scale * (self.lora_B @ self.lora_A)).view_as(value)


class LoRALinear(_LoRA, nn.Linear):
    """Linear layer with LoRA."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = nn.Module.__getattr__(self, "weight")
        y = F.linear(input, weight, self.bias)
        return y if self.lora_B is None else y + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


class LoRAConv2d(_LoRA, nn.Conv2d):
    """Convolution with LoRA."""


class LoRAAttention(nn.Module):
    """Self-attention of `torch.nn.MultiheadAttention`, with ``batch_first``, whose projections can have LoRA.

    ``rank`` is that of the input projection, whose weight is ``in_proj_weight``; 0: none. ``out_proj`` is a layer of
    its own.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter | None

    def __init__(self, layer: nn.MultiheadAttention, *, rank: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.scale = layer.num_heads, scale
        self.in_proj_weight, self.in_proj_bias = layer.in_proj_weight, layer.in_proj_bias
        _add_factors(self, layer.in_proj_weight, rank=rank)
        self.out_proj: nn.Linear = layer.out_proj

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        """Return the output for tokens ``(batch, tokens, width)``, which are query, key and value, and no weights."""
        x = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        if self.lora_B is not None:
            x = x + self.scale * F.linear(F.linear(query, self.lora_A), self.lora_B)
        return self.out_proj(attention(x, heads=self.num_heads)), None


LoRALayer = LoRALinear | LoRAConv2d | LoRAAttention


def weight_name(layer: LoRALayer) -> str:
    """Return the name of the weight that the layer's factors belong to."""
    return "in_proj_weight" if isinstance(layer, LoRAAttention) else "weight"


@torch.no_grad()
def merge(layer: LoRALayer) -> None:
    """Add the product to the weight, and remove the factors."""
    if layer.lora_B is None:
        return
    weight = dict(layer.named_parameters(recurse=False))[weight_name(layer)]
    product = layer.scale * (layer.lora_B.double() @ layer.lora_A.double())
    merged = (weight.double() + product.view_as(weight)).to(weight.dtype)
    layer.register_parameter(weight_name(layer), nn.Parameter(merged.contiguous()))
    for name in ("lora_A", "lora_B"):
        layer.register_parameter(name, None)


def _add_factors(layer: nn.Module, weight: Tensor, *, rank: int) -> None:
    """Add A, drawn as the weights of `torch.nn.Linear`, and B = 0, so that the output stays the same; rank 0: none."""
    factors: dict[str, nn.Parameter | None] = {"lora_A": None, "lora_B": None}
    if rank:
        a = weight.new_empty(rank, weight[0].numel())
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        factors = {"lora_A": nn.Parameter(a), "lora_B": nn.Parameter(weight.new_zeros(len(weight), rank))}
    for name, factor in factors.items():
        layer.register_parameter(name, factor)


def lora(
    encoder: Encoder,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] | None = None,
    aggregation: str = "factors",
    ranks: Sequence[int] | None = None,
) -> None:
    r"""Train low-rank factors A and B of weights W, which become W + ``alpha`` / ``rank`` B A.

    $$
    y = W x + \frac{\alpha}{r} B A x \qquad B_0 = 0 \qquad (A_0)_{ij} \sim \mathcal{U}(-1 / \sqrt{n}, 1 / \sqrt{n})
    $$

    with W the frozen weight of a layer, A and B its factors of rank r, n the columns of W, and $\alpha$ the ``alpha``.

    Parameters
    ----------
    encoder : Encoder
        The new encoder. Its layers become base layers.
    rank : int
        r, at most the number of rows and columns of each weight.
    alpha : float
        Numerator of the scale; positive.
    targets : sequence of str or None
        Names of layers, or their last components as in PEFT's ``target_modules``. The projections of an attention are
        ``in_proj`` and ``out_proj``. None: all linear and convolutional layers, except depthwise convolutions, whose
        kernels have few elements and whose factors would need r times as many channels.
    aggregation : {"factors", "freeze_a", "exact", "stack", "svd"}
        "factors": A and B are trained and aggregated separately (FedIT, arXiv 2305.05644). "freeze_a": A keeps its
        initial values, so that the mean of products is the product of the means (FFA-LoRA, arXiv 2403.12313). For the
        others see `strategies.low_rank_aggregation`; with "exact" and "stack" the server changes W.
    ranks : sequence of int or None
        Ranks that clients have in turn, at most ``rank``. None: all have ``rank``.
    """
    check_arguments("tuning", rank=rank, alpha=alpha, targets=targets, aggregation=aggregation, ranks=ranks)
    if ranks is not None and (not ranks or max(ranks) > rank):
        raise InputError(f"tuning.ranks={list(ranks)} must be ranks up to tuning.rank={rank}; raise tuning.rank")
    base = list(encoder.state_dict())
    weights = _weights(encoder)
    names = _select(encoder, weights, targets=targets)
    for name in names:
        rows, columns = weights[name]
        if rank > min(rows, columns):
            raise InputError(
                f"tuning.rank={rank} but the layer {name} of the encoder has a weight of {rows} x {columns}; set "
                f"tuning.rank to at most {min(rows, columns)}, or tuning.targets without this layer"
            )
    tensors = encoder.state_dict(keep_vars=True)
    uses = Counter(map(id, tensors.values()))
    tied = [name for name in names if uses[id(tensors.get(f"{name}.weight", tensors.get(f"{name}_weight")))] > 1]
    if tied:
        raise InputError(f"tuning=lora but {shortened(tied)} have one weight; set tuning.targets without them")
    _insert(encoder, names, rank=rank, scale=alpha / rank)
    layers = []
    for path, module in encoder.named_modules():
        if isinstance(module, LoRALayer) and module.lora_B is not None:
            layers.append(
                LowRankLayer(f"{path}.{weight_name(module)}", f"{path}.lora_A", f"{path}.lora_B", alpha / rank)
            )
    encoder.low_rank_layers = tuple(layers)
    fixed = [layer.a for layer in layers] if aggregation == "freeze_a" else []
    merged = [layer.weight for layer in layers] if aggregation in ("exact", "stack") else []
    encoder.freeze_base([*base, *fixed], merged=merged)


def plain_copy(network: Network) -> Network:
    """Return a copy without LoRA layers, whose products are added to the weights, and without base layers.

    Adapters stay. It shares neither layers nor active stages with the original, and everything can be trained.
    """
    copied = copy.deepcopy(network)
    for module in copied.modules():
        if isinstance(module, LoRALayer):
            merge(module)
    if isinstance(copied, Encoder):
        copied.low_rank_layers = ()
        copied.freeze_base(())
    return copied.requires_grad_(True)


def _weights(encoder: Encoder) -> dict[str, tuple[int, int]]:
    """Return rows and columns of the weights that can have LoRA, by the name of their layer."""
    weights = {}
    for name, module in encoder.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            rows, columns = module.in_proj_weight.shape
            weights[f"{name}.{IN_PROJ}"] = rows, columns
        # Subclasses with another forward, such as TensorFlow's padding, are not replaced.
        # Nor are layers whose weight is computed, as by spectral normalization.
        is_plain = type(module).forward in (nn.Linear.forward, nn.Conv2d.forward) and "weight" in module._parameters
        if isinstance(module, nn.Linear | nn.Conv2d) and is_plain:
            weights[name] = len(module.weight), module.weight[0].numel()
    return weights


def _select(encoder: Encoder, weights: dict[str, tuple[int, int]], *, targets: Sequence[str] | None) -> list[str]:
    """Return the names of the layers that get factors; raises `InputError` for a target without a layer."""
    if targets is None:
        depthwise = {
            name
            for name, module in encoder.named_modules()
            if isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1
        }
        names = [name for name in weights if name not in depthwise]
        if not names:
            raise InputError("tuning=lora but the encoder has no linear or convolutional layer; set another tuning")
        return names
    for target in targets:
        if not any(_matches(name, target) for name in weights):
            short = (name.rpartition(".")[2] for name in weights)
            known = dict.fromkeys([*(name for name in short if not name.isdecimal()), *weights])
            raise InputError(
                f"tuning.targets has {target!r}, which is no linear or convolutional layer of the encoder"
                f"{did_you_mean(target, list(known))}; its layers have names such as {', '.join(list(known)[:4])}"
            )
    names = [name for name in weights if any(_matches(name, target) for target in targets)]
    if not names:
        raise InputError("tuning.targets is empty; name layers of the encoder, or set it to null")
    return names


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _insert(encoder: Encoder, names: Sequence[str], *, rank: int, scale: float) -> None:
    """Replace the layers of these names."""
    chosen = set(names)
    for path, module in list(encoder.named_modules()):
        if isinstance(module, nn.MultiheadAttention) and chosen & {f"{path}.{IN_PROJ}", f"{path}.out_proj"}:
            rank_in = rank if f"{path}.{IN_PROJ}" in chosen else 0
            encoder.set_submodule(path, LoRAAttention(_supported(module, path), rank=rank_in, scale=scale))
    for path, module in list(encoder.named_modules()):
        if path in chosen and isinstance(module, nn.Linear):
            encoder.set_submodule(path, LoRALinear(module, rank=rank, scale=scale))
        elif path in chosen and isinstance(module, nn.Conv2d):
            encoder.set_submodule(path, LoRAConv2d(module, rank=rank, scale=scale))


def _supported(layer: nn.MultiheadAttention, path: str) -> nn.MultiheadAttention:
    if not layer.batch_first or layer.dropout or layer.bias_k is not None or layer.add_zero_attn:
        raise InputError(
            f"tuning=lora does not support the attention {path} of the encoder (dropout, key biases, or another order "
            "of axes); set tuning.targets to other layers"
        )
    return layer
