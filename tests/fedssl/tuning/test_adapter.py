"""tuning=adapter: the adapters' output and gradients, where they are, and what is trained, exchanged and exported."""

import copy
from unittest.mock import patch

import pytest
import torch
from torchvision.models import VisionTransformer

from fedssl.config.load import compose
from fedssl.encoders import conv_small, resnet18, resnet50, timm, torchvision, vit_tiny
from fedssl.encoders.base import Adapter, frozen_copy
from fedssl.encoders.factory import ConvSmall
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_names, local_names
from fedssl.schedule.stages import set_active_stages, stage_range
from fedssl.seeding import torch_generator
from fedssl.training import method_inputs
from fedssl.tuning import adapter, plain_copy
from fedssl.views import Views
from tests.cases import some

SMALL = ["encoder.width=4", "batch_size=4", "local_epochs=1", "method.projector.hidden_dim=8", "threads=1"]
ADAPTER = ["tuning=adapter", "tuning.bottleneck=3"]
VIT = ["encoder=vit_tiny", "encoder.depth=2", "encoder.heads=2", "encoder.patch=4"]
LAYERS = ("down.weight", "down.bias", "up.weight", "up.bias")

ENCODERS = {
    "conv_small": lambda: conv_small(channels=1, size=8, width=4),
    "resnet18": lambda: resnet18(channels=1, size=8),
    "resnet50": lambda: resnet50(channels=1, size=8, norm="group"),
    "vit": lambda: vit_tiny(channels=1, size=8, depth=3, width=8, heads=2),
    "vit-mean": lambda: vit_tiny(channels=1, size=8, depth=3, width=8, heads=2, pool="mean", registers=1),
    "timm-efficientnet": lambda: timm(name="efficientnet_lite0", channels=1, size=32),
    "timm-vit": lambda: timm(name="test_vit", channels=1, size=160),
    "timm-resnet": lambda: timm(name="test_resnet", channels=1, size=32),
    "timm-convnext": lambda: timm(name="test_convnext", channels=1, size=32),
    "timm-unknown": lambda: timm(name="mobilenetv3_small_050", channels=1, size=32),
    "torchvision-efficientnet": lambda: torchvision(name="efficientnet_b0", channels=1, size=32),
    "torchvision-resnet": lambda: torchvision(name="resnet18", channels=1, size=32),
    "torchvision-vit": lambda: torchvision_vit(),
    "torchvision-unknown": lambda: torchvision(name="shufflenet_v2_x0_5", channels=1, size=32),
}


def torchvision_vit():
    """torchvision's smallest one has 88 million weights."""
    sizes = {"patch_size": 16, "num_layers": 3, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
    with patch("torchvision.models.get_model", lambda name, image_size: VisionTransformer(image_size, **sizes)):
        return torchvision(name="vit_b_32", channels=1, size=32)


def images_of(encoder, count=2):
    size = encoder.image_size or 32
    return torch.rand(count, 1, size, size, generator=torch_generator(0, "images"))


def make(*overrides):
    settings = compose([*SMALL, *ADAPTER, *overrides])
    return settings, build_method(settings.model)


def fill(encoder):
    """Draw ``up``, which is 0 at first."""
    with torch.no_grad():
        for name, parameter in encoder.adapters.named_parameters():
            if ".up." in name:
                parameter.normal_(std=0.3)
    return encoder


def make_adapter(down, down_bias, up, up_bias):
    layer = Adapter(len(up), bottleneck=len(down)).double()
    for parameter, values in zip(layer.parameters(), (down, down_bias, up, up_bias), strict=True):
        parameter.data = torch.tensor(values, dtype=torch.float64)
    return layer


def test_the_output_by_hand():
    """One hidden number: down h = h_1 - h_2 + 0.5, and GELU(a) = a P(a) with the normal distribution function P.

    Of (3, 1) it is a = 2.5 with P(2.5) = 0.99379033, and of (0, 2) it is a = -1.5 with P(-1.5) = 0.06680720. The
    outputs are (3 + 2 * 2.48447584 + 0.25, 1 + 3 * 2.48447584) and (0 - 2 * 0.10021080 + 0.25, 2 - 3 * 0.10021080).
    """
    layer = make_adapter([[1.0, -1.0]], [0.5], [[2.0], [3.0]], [0.25, 0.0])
    h = torch.tensor([[3.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    expected = torch.tensor([[8.21895167, 8.45342751], [0.0495784, 1.6993676]], dtype=torch.float64)
    torch.testing.assert_close(layer(h), expected, rtol=0, atol=1e-7)
    assert torch.equal(layer(h[None]), layer(h)[None])  # two tokens of an image
    assert torch.equal(layer(h.T[None, :, :, None]), layer(h).T[None, :, :, None])  # two positions of a map


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6), (2, 6, 3, 4)])
def test_gradients_equal_a_transcription(shape):
    """With a = D h + d and y = h + U g(a) + u, by the chain rule, for all positions as rows.

    g(a) = a P(a) has the derivative P(a) + a p(a), with the normal distribution function P and its density p.
    """
    generator = torch_generator(0, "adapter")
    layer = Adapter(6, bottleneck=4).double()
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    layer(x).backward(g)
    axis = 1 if len(shape) == 4 else -1
    h, dy = (value.detach().movedim(axis, -1).reshape(-1, 6) for value in (x, g))
    down, d, up, _ = (parameter.detach() for parameter in layer.parameters())
    a = h @ down.T + d
    distribution, density = (1 + torch.erf(a / 2**0.5)) / 2, torch.exp(-(a**2) / 2) / (2 * torch.pi) ** 0.5
    da = (dy @ up) * (distribution + a * density)
    expected = (da.T @ h, da.sum(0), dy.T @ (a * distribution), dy.sum(0))
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
    dx = x.grad.movedim(axis, -1).reshape(-1, 6)
    torch.testing.assert_close(dx, dy + da @ down, rtol=1e-12, atol=1e-12)


def run_by_hand(encoder, images):
    """Return h: each stage, then h + U g(a) + u with a = D h + d at every position, and g(a) = a P(a)."""
    x = encoder.run_stem(images)
    for number, stage in enumerate(encoder.stage_modules(), start=1):
        x = stage(x)
        if str(number) in encoder.adapters:
            down, d, up, u = encoder.adapters[str(number)].parameters()
            h = x.movedim(1, -1) if x.ndim == 4 else x
            a = h @ down.T + d
            h = h + (a * (1 + torch.erf(a / 2**0.5)) / 2) @ up.T + u
            x = h.movedim(-1, 1) if x.ndim == 4 else h
    return encoder.pool(x)


@pytest.mark.parametrize("name", some(ENCODERS, default=("conv_small", "vit", "timm-unknown")))
def test_new_adapters_leave_the_output_and_follow_stages(name):
    encoder = ENCODERS[name]().eval()
    images = images_of(encoder)
    base = {key: value.clone() for key, value in encoder.state_dict().items()}
    with torch.no_grad():
        before = encoder(images)
        adapter(encoder, bottleneck=3)
        assert torch.equal(encoder(images), before)
        after = fill(encoder)(images)
        assert (after - before).abs().max() > 1e-3 * before.abs().max()
        torch.testing.assert_close(after, run_by_hand(encoder, images), rtol=1e-4, atol=1e-5)
        for copied in (copy.deepcopy(encoder), frozen_copy(encoder), plain_copy(encoder).eval()):
            assert torch.equal(copied(images), after)
    numbers = range(1, len(encoder.stage_names) + 1)
    assert set(encoder.state_dict()) - set(base) == {f"adapters.{n}.{layer}" for n in numbers for layer in LAYERS}
    assert encoder.base_names == set(base)
    assert all(torch.equal(encoder.state_dict()[key], value) for key, value in base.items())
    assert encoder.adapter_settings == {"bottleneck": 3, "blocks": len(numbers)}


def test_adapters_of_the_last_stages_only():
    encoder = ENCODERS["vit"]()
    adapter(encoder, bottleneck=3, blocks=2)
    assert list(encoder.adapters) == ["2", "3"]
    assert encoder.frozen_stages == 1
    assert encoder.adapter_settings == {"bottleneck": 3, "blocks": 2}
    _, method = make("tuning.blocks=2", "method=byol")
    assert stage_range(method, "encoder.adapters.3.up.weight") == (3, float("inf"), 3)
    assert stage_range(method, "target_encoder.adapters.4.up.weight") == (4, float("inf"), 4)
    all_stages = ENCODERS["vit"]()
    adapter(all_stages, bottleneck=3, blocks=3)
    assert list(all_stages.adapters) == ["1", "2", "3"]
    assert all_stages.frozen_stages == 0


def test_stages_before_adapters_run_once_without_gradients():
    _, method = make("tuning.blocks=1", "method=byol")
    outputs = []
    for encoder in (method.encoder, method.target_encoder):
        encoder.get_submodule("blocks.2").register_forward_hook(lambda *run: outputs.append(run[2]))
    views = Views.of(*torch.rand(2, 4, 1, 8, 8))
    with set_active_stages(method, depth=4, frozen=method.encoder.frozen_stages):
        method.loss(method_inputs(method.train(), views, None, torch_generator(0))).backward()
    assert len(outputs) == 2  # one per view, instead of two
    assert not any(output.requires_grad for output in outputs)
    assert method.encoder.adapters["4"].up.weight.grad.any()


@pytest.mark.parametrize("blocks", ["null", "1"])
@pytest.mark.parametrize("overrides", [[], VIT])
def test_gradients_of_a_method_are_those_by_hand(blocks, overrides, monkeypatch):
    """In float64; the reference runs stages and adapters one after the other, by plain matrix products."""
    _, method = make(f"tuning.blocks={blocks}", *overrides)
    method.double().train()
    fill(method.encoder)
    reference = copy.deepcopy(method)
    views = Views.of(*torch.rand(2, 6, 1, 8, 8, dtype=torch.float64, generator=torch_generator(0)))
    with set_active_stages(method, depth=len(method.encoder.stage_names), frozen=method.encoder.frozen_stages):
        loss = method.loss(method_inputs(method, views, None, torch_generator(0)))
        loss.backward()
    monkeypatch.setattr(type(reference.encoder), "forward", run_by_hand)
    expected = reference.loss(views)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert {name for name in method.trainable if name.startswith("encoder.")} == {
        f"encoder.adapters.{name}" for name, _ in method.encoder.adapters.named_parameters()
    }
    for name in method.trainable:
        gradient = method.named_tensors[name].grad
        torch.testing.assert_close(gradient, reference.named_tensors[name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("overrides", [[], VIT, ["tuning.blocks=1"]], ids=" ".join)
@pytest.mark.parametrize("method_name", ["byol", "dino", "moco_v3"])
def test_only_adapters_are_exchanged_and_targets_share_the_base(method_name, overrides):
    _, method = make(f"method={method_name}", *overrides)
    expected = {f"encoder.adapters.{name}" for name, _ in method.encoder.adapters.named_parameters()}
    assert {name for name in exchanged_names(method) if name.startswith("encoder.")} == expected
    targets = {name for name in [*exchanged_names(method), *local_names(method)] if name.startswith("target_encoder.")}
    assert targets == {f"target_{name}" for name in expected}
    online, target = method.encoder.state_dict(keep_vars=True), method.target_encoder.state_dict(keep_vars=True)
    assert all((online[name] is target[name]) == (name in method.encoder.base_names) for name in online)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tuning.bottleneck=0"], "tuning.bottleneck=0 must be an integer of at least 1"),
        (["tuning.blocks=0"], "tuning.blocks=0 must be an integer of at least 1, or null"),
        (
            ["tuning.blocks=5"],
            "tuning.blocks=5 but the encoder has 4 stages; set tuning.blocks to at most 4, or to null",
        ),
    ],
)
def test_invalid_settings_are_rejected(overrides, message):
    with pytest.raises(InputError, match=message):
        make(*overrides)


def test_an_encoder_with_its_own_forward_is_rejected():
    class Plain(ConvSmall):
        def forward(self, x):
            return self.pool(x)

    with pytest.raises(InputError, match="tuning=adapter but Plain overrides forward, which runs the adapters"):
        adapter(Plain(widths=(1, 2), strides=(1,)), bottleneck=1)
