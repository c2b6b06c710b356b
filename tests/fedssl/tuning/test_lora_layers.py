"""LoRA layers: outputs and gradients are those of the dense weight W + scale B A, in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedssl.tuning.lora_layers import LoRAAttention, LoRAConv2d, LoRALinear, merge, weight_name

SCALE = 0.7


def attention(width=8, heads=2):
    return nn.MultiheadAttention(width, heads, batch_first=True)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), LoRALinear, (5, 6)),
    "linear of tokens": (lambda: nn.Linear(6, 4, bias=False), LoRALinear, (2, 5, 6)),
    "conv": (lambda: nn.Conv2d(3, 8, 3, stride=2, padding=1), LoRAConv2d, (2, 3, 7, 6)),
    "dilated": (lambda: nn.Conv2d(4, 6, (3, 1), dilation=2, padding="same", bias=False), LoRAConv2d, (2, 4, 7, 6)),
    "1x1": (lambda: nn.Conv2d(4, 6, 1), LoRAConv2d, (2, 4, 3, 3)),
    "grouped": (lambda: nn.Conv2d(6, 8, 3, groups=2, padding=1), LoRAConv2d, (2, 6, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6, stride=2), LoRAConv2d, (2, 6, 5, 5)),
    "reflecting": (lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), LoRAConv2d, (2, 3, 6, 5)),
    "patches": (lambda: nn.Conv2d(3, 8, 4, stride=4), LoRAConv2d, (2, 3, 8, 8)),
    "attention": (attention, LoRAAttention, (2, 5, 8)),
}


def make(kind, rank=2):
    make_layer, lora, shape = LAYERS[kind]
    torch.manual_seed(0)
    plain = make_layer().double()
    layer = lora(copy.deepcopy(plain), rank=rank, scale=SCALE)
    with torch.no_grad():
        layer.lora_B.normal_()
        if kind == "attention":
            plain.in_proj_bias.normal_()
            layer.in_proj_bias.copy_(plain.in_proj_bias)
    return plain, layer, torch.randn(shape, dtype=torch.float64)


def call(layer, x):
    attends = isinstance(layer, nn.MultiheadAttention | LoRAAttention)
    return layer(x, x, x, need_weights=False)[0] if attends else layer(x)


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_and_gradients_are_those_of_the_dense_weight(kind):
    plain, layer, x = make(kind)
    name = weight_name(layer)
    a, b = (value.detach().clone().requires_grad_() for value in (layer.lora_A, layer.lora_B))
    dense = plain.get_parameter(name).detach() + SCALE * (b @ a).view_as(plain.get_parameter(name))
    parameters = {other: value for other, value in plain.named_parameters() if other != name} | {name: dense}
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    if kind == "attention":
        expected = functional_call(plain, parameters, (theirs, theirs, theirs), {"need_weights": False})[0]
    else:
        expected = functional_call(plain, parameters, (theirs,))
    y = call(layer, ours)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    for gradient, reference in ((ours.grad, theirs.grad), (layer.lora_A.grad, a.grad), (layer.lora_B.grad, b.grad)):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_new_layer_gives_the_output_it_replaces(kind):
    make_layer, lora, shape = LAYERS[kind]
    plain = make_layer()
    before = call(plain, torch.ones(shape))
    layer = lora(plain, rank=2, scale=SCALE)
    torch.testing.assert_close(call(layer, torch.ones(shape)), before)
    own = {name: value for name, value in layer.named_parameters() if "lora" not in name}
    assert own.keys() == dict(plain.named_parameters()).keys()
    assert all(value is plain.get_parameter(name) for name, value in own.items())


@pytest.mark.parametrize("kind", LAYERS)
def test_a_merged_layer_gives_the_same_output(kind):
    plain, layer, x = make(kind)
    expected = call(layer, x)
    merge(layer)
    merge(layer)  # changes nothing more
    torch.testing.assert_close(call(layer, x), expected, rtol=1e-12, atol=1e-12)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(call(plain, x), expected, rtol=1e-12, atol=1e-12)


def test_attention_without_factors_of_its_input_projection():
    plain = attention().double()
    layer = LoRAAttention(plain, rank=0, scale=SCALE)
    layer.out_proj = LoRALinear(plain.out_proj, rank=2, scale=SCALE)
    with torch.no_grad():
        layer.out_proj.lora_B.normal_()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    parameters = dict(plain.named_parameters())
    product = SCALE * layer.out_proj.lora_B @ layer.out_proj.lora_A
    parameters["out_proj.weight"] = parameters["out_proj.weight"] + product
    expected = functional_call(plain, parameters, (x, x, x), {"need_weights": False})[0]
    torch.testing.assert_close(call(layer, x), expected, rtol=1e-10, atol=1e-10)
    assert layer.lora_B is None


def test_no_dense_product_is_computed():
    """The largest tensor that a forward pass with LoRA adds to the plain one has r rows or columns."""
    layer = LoRALinear(nn.Linear(50, 60), rank=2, scale=1.0)
    seen = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            seen.append((function, tuple(getattr(result, "shape", ()))))
            return result

    with Record():
        layer(torch.ones(3, 50))
    assert [shape for function, shape in seen if function is F.linear] == [(3, 60), (3, 2), (3, 60)]
    assert (60, 50) not in [shape for _, shape in seen]
