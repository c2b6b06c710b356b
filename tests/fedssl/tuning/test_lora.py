"""tuning=lora: layers with factors in float64, which layers get them, what is exchanged, and the merged encoder."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedssl.config.load import compose
from fedssl.encoders import conv_small, torchvision, vit_tiny
from fedssl.encoders.base import Encoder, frozen_copy
from fedssl.errors import InputError
from fedssl.low_rank_products import LowRankLayer
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_names, local_names
from fedssl.tuning import last_blocks, lora, plain_copy
from fedssl.tuning.lora import LoRAAttention, LoRAConv2d, LoRALinear, merge, weight_name


class Padded(nn.Conv2d):
    """A convolution with another forward, such as timm's padding of TensorFlow."""

    def forward(self, input):
        return super().forward(nn.functional.pad(input, (0, 2, 0, 2)))


class Depthwise(Encoder):
    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(4, 8, 3, groups=4)
        self.point = nn.Conv2d(8, 16, 1)
        self.padded = Padded(16, 16, 3)
        self.define_stages(stages=("wide", "point", "padded"), widths=(8, 16, 16))


SMALL = ["encoder.width=8", "method.projector.hidden_dim=8", "threads=1", "tuning=lora", "tuning.rank=2"]
VIT = ["encoder=vit_tiny", "encoder.depth=2", "encoder.heads=2", "encoder.patch=4"]
ATTENTION = "encoder.layers.encoder_layer_0.self_attention"


def small_vit():
    return vit_tiny(channels=1, size=8, depth=1, width=8, heads=2)


def make(*overrides):
    settings = compose([*SMALL, *overrides])
    return settings, build_method(settings.model)


def adapted(encoder):
    return [layer.weight for layer in encoder.low_rank_layers]


def fill(encoder):
    """Draw the factors B, which are 0 at first."""
    with torch.no_grad():
        for layer in encoder.low_rank_layers:
            encoder.get_parameter(layer.b).normal_(std=0.1)


def test_all_linear_and_convolutional_layers_get_factors():
    encoder = small_vit()
    before = list(encoder.state_dict())
    lora(encoder, rank=2, alpha=6)
    assert set(adapted(encoder)) == {
        "conv_proj.weight",
        f"{ATTENTION}.in_proj_weight",
        f"{ATTENTION}.out_proj.weight",
        "encoder.layers.encoder_layer_0.mlp.0.weight",
        "encoder.layers.encoder_layer_0.mlp.3.weight",
    }
    assert encoder.base_names == set(before)
    assert encoder.low_rank_layers[0] == LowRankLayer("conv_proj.weight", "conv_proj.lora_A", "conv_proj.lora_B", 3.0)
    for layer in encoder.low_rank_layers:
        weight, a, b = (dict(encoder.named_parameters())[name] for name in (layer.weight, layer.a, layer.b))
        assert (len(b), b.shape[1], a.shape[1]) == (len(weight), 2, weight[0].numel())
        assert (weight.requires_grad, a.requires_grad, b.requires_grad) == (False, True, True)
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert trained == set(encoder.state_dict()) - set(before)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["in_proj"], [f"{ATTENTION}.in_proj_weight"]),
        (["out_proj", "conv_proj"], ["conv_proj.weight", f"{ATTENTION}.out_proj.weight"]),
        (["mlp.3"], ["encoder.layers.encoder_layer_0.mlp.3.weight"]),
        (["encoder.layers.encoder_layer_0.mlp.0"], ["encoder.layers.encoder_layer_0.mlp.0.weight"]),
    ],
)
def test_targets_are_names_or_their_last_components(targets, expected):
    encoder = small_vit()
    images = torch.rand(2, 1, 8, 8)
    before = encoder.eval()(images)
    lora(encoder, rank=2, alpha=2, targets=targets)
    assert adapted(encoder) == expected
    torch.testing.assert_close(encoder.eval()(images), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": ["inproj"]}, "tuning.targets has 'inproj', which is no linear .*; did you mean in_proj or"),
        ({"targets": ["ln_1"]}, "tuning.targets has 'ln_1', which is no linear or convolutional layer"),
        ({"targets": []}, "tuning.targets is empty"),
        ({"rank": 9}, "tuning.rank=9 but the layer .* has a weight of .* set tuning.rank to at most 8"),
        ({"rank": 0}, "tuning.rank=0 must be an integer of at least 1"),
        ({"alpha": 0}, "tuning.alpha=0 must be a number above 0"),
        ({"aggregation": "mean"}, "tuning.aggregation=mean must be factors or freeze_a"),
    ],
)
def test_invalid_settings_are_rejected_before_the_encoder_changes(arguments, message):
    encoder = small_vit()
    before = list(encoder.state_dict())
    with pytest.raises(InputError, match=message):
        lora(encoder, **{"rank": 2, "alpha": 2, **arguments})
    assert list(encoder.state_dict()) == before


@pytest.mark.parametrize("overrides", [[], VIT])
def test_only_factors_are_exchanged_and_targets_share_the_base(overrides):
    _, method = make("method=byol", *overrides)
    expected = {f"encoder.{name}" for layer in method.encoder.low_rank_layers for name in (layer.a, layer.b)}
    assert {name for name in exchanged_names(method) if name.startswith("encoder.")} == expected
    targets = {name for name in local_names(method) if name.startswith("target_encoder.")}
    assert targets == {f"target_{name}" for name in expected}
    online, target = method.encoder.state_dict(keep_vars=True), method.target_encoder.state_dict(keep_vars=True)
    assert all((online[name] is target[name]) == (name in method.encoder.base_names) for name in online)
    assert [layer.b for layer in method.low_rank_layers] == [
        f"encoder.{layer.b}" for layer in method.encoder.low_rank_layers
    ]


def test_frozen_factors_are_base_layers_that_targets_share():
    _, method = make("method=byol", "method.target_init=average", "tuning.aggregation=freeze_a")
    assert all("lora_B" in name for name in exchanged_names(method) if "encoder." in name)
    layers = method.low_rank_layers
    assert {layer.a for layer in layers} <= set(method.base_names)
    assert {layer.b for layer in layers} <= set(exchanged_names(method))
    assert {layer.weight.partition(".")[0] for layer in layers} == {"encoder", "target_encoder"}
    assert len(layers) == 2 * len(method.encoder.low_rank_layers)
    assert all(name in method.named_tensors for layer in layers for name in (layer.a, layer.b))


@pytest.mark.parametrize("make_encoder", [small_vit, lambda: conv_small(channels=1, size=8, width=8)])
def test_the_plain_copy_has_the_products_in_its_weights(make_encoder):
    """Also of a network in training mode, whose copy by `frozen_copy` gives the same output."""
    encoder, plain = make_encoder(), make_encoder()
    names = list(encoder.state_dict())
    lora(encoder, rank=4, alpha=2, targets=None)
    fill(encoder)
    encoder.eval()
    images = torch.rand(4, 1, 8, 8)
    copied = plain_copy(encoder).eval()
    assert list(copied.state_dict()) == names
    plain.load_state_dict(copied.state_dict())
    for other in (copied, plain.eval(), frozen_copy(encoder).eval(), copy.deepcopy(encoder)):
        torch.testing.assert_close(other(images), encoder(images), rtol=0, atol=1e-6)
    layer = encoder.low_rank_layers[0]
    a, b = (encoder.get_parameter(name).double() for name in (layer.a, layer.b))
    weight = encoder.state_dict()[layer.weight]
    expected = weight.double() + 0.5 * (b @ a).view_as(weight)
    torch.testing.assert_close(copied.get_parameter(layer.weight).double(), expected, rtol=1e-6, atol=1e-7)
    assert all(parameter.requires_grad for parameter in copied.parameters())


def test_weights_used_without_their_layer_have_the_product():
    """The attention of Swin calls a function with the weights of its layers."""
    encoder = torchvision(name="swin_t", channels=3, size=32)
    lora(encoder, rank=1, alpha=1, targets=["qkv", "proj"])
    fill(encoder)
    images = torch.rand(1, 3, 32, 32)
    h = encoder.eval()(images)
    h.square().sum().backward()
    assert all(
        encoder.get_parameter(name).grad.any() for layer in encoder.low_rank_layers for name in (layer.a, layer.b)
    )
    torch.testing.assert_close(plain_copy(encoder).eval()(images), h, rtol=1e-4, atol=1e-5)


def test_depthwise_convolutions_are_adapted_if_they_are_named():
    """A depthwise 3x3 kernel has 9 elements, so that its matrix is 8 x 9; the 1x1 convolution has 16 x 8."""
    encoder = Depthwise()
    lora(encoder, rank=8, alpha=1)
    assert adapted(encoder) == ["point.weight"]
    encoder = Depthwise()
    lora(encoder, rank=8, alpha=1, targets=["wide"])
    assert adapted(encoder) == ["wide.weight"]
    with pytest.raises(InputError, match=r"the layer point of the encoder has a weight of 16 x 8"):
        lora(Depthwise(), rank=9, alpha=1)
    with pytest.raises(InputError, match=r"tuning.rank=9 but the layer wide of the encoder has a weight of 8 x 9"):
        lora(Depthwise(), rank=9, alpha=1, targets=["wide"])


# --- layers ---

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


def new_layer(kind, rank=2):
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
    plain, layer, x = new_layer(kind)
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
    plain, layer, x = new_layer(kind)
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


class Tied(Encoder):
    """A linear layer, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.b.weight
        self.define_stages(stages=("a", "b", "c"), widths=(4, 4, 4))


def test_layers_that_share_a_weight_get_no_factors():
    with pytest.raises(InputError, match="tuning=lora but b, c have one weight; set tuning.targets without them"):
        lora(Tied(), rank=2, alpha=2)
    encoder = Tied()
    lora(encoder, rank=2, alpha=2, targets=["a"])
    assert adapted(encoder) == ["a.weight"]
    with pytest.raises(InputError, match="the tuning freezes b.weight, which is also c.weight; set tuning=full"):
        last_blocks(Tied(), blocks=1)


def test_layers_whose_weight_is_computed_get_no_factors():
    encoder = Tied()
    encoder.c = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    encoder.a = nn.utils.weight_norm(nn.Linear(4, 4))
    lora(encoder, rank=2, alpha=2)
    assert adapted(encoder) == ["b.weight"]


def test_a_linear_layer_may_have_the_name_of_a_projection():
    encoder = Tied()
    encoder.c = nn.ModuleDict({"in_proj": nn.Linear(4, 4)})
    lora(encoder, rank=2, alpha=2)
    assert adapted(encoder) == ["a.weight", "b.weight", "c.in_proj.weight"]
