"""Encoders: sizes, torchvision's names and counts, and what is refused."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fedssl.encoders import Encoder, conv_small, resnet18, resnet34, resnet50, vit_base, vit_small, vit_tiny
from fedssl.encoders.tokens import sincos_position_embedding
from fedssl.errors import InputError
from fedssl.machine.meta_device import shapes_only

CONF = Path(__file__).parents[3] / "conf"
RESNETS = [
    (resnet18, torchvision.models.resnet18),
    pytest.param(resnet34, torchvision.models.resnet34, marks=pytest.mark.heavy),  # the blocks of resnet18
    (resnet50, torchvision.models.resnet50),
]


@pytest.mark.parametrize("size", [4, 8, 28, 32, 64, 96])
@pytest.mark.parametrize("channels", [1, 3])
def test_conv_small_runs_at_every_size(size: int, channels: int) -> None:
    encoder = conv_small(channels=channels, size=size, width=8)
    images = torch.rand(2, channels, size, size)
    assert encoder.train()(images).shape == (2, encoder.feature_dim) == (2, 32)
    assert encoder.eval()(images).shape == (2, 32)


@pytest.mark.parametrize(("build", "original"), RESNETS)
def test_resnets_begin_with_torchvisions_weights(build, original) -> None:
    """The same seed gives the same weights, except in the first convolution, which is drawn again."""
    torch.manual_seed(0)
    ours = build(channels=3, size=64, stem="imagenet")
    after = torch.get_rng_state()
    torch.manual_seed(0)
    theirs = original(weights=None)
    torch.nn.init.kaiming_normal_(theirs.conv1.weight, mode="fan_out", nonlinearity="relu")
    assert torch.equal(torch.get_rng_state(), after)
    state = theirs.state_dict()
    for layer, value in ours.state_dict().items():
        assert torch.equal(value, state[layer]), layer


@pytest.mark.heavy
def test_resnets_import_neither_torchvision_nor_torchs_compiler() -> None:
    program = "from fedssl.encoders import resnet18; resnet18(channels=3, size=64); import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert {"torchvision", "torch._dynamo", "sympy"}.isdisjoint(loaded)


@pytest.mark.parametrize(("build", "original"), RESNETS)
def test_resnet_with_imagenet_stem_equals_torchvision(build, original) -> None:
    """Loaded with torchvision's weights, the encoder gives what torchvision's network gives without its classifier."""
    theirs = original(weights=None)
    theirs.fc = torch.nn.Identity()
    encoder = build(channels=3, size=64, stem="imagenet")
    encoder.load_state_dict(theirs.state_dict())
    with torch.device("meta"):
        small = build(channels=3, size=32).state_dict()
    assert list(small) == list(theirs.state_dict())
    assert small["conv1.weight"].shape == (64, 3, 3, 3)
    assert [name for name, value in theirs.state_dict().items() if small[name].shape != value.shape] == ["conv1.weight"]
    assert encoder.feature_dim == (2048 if build is resnet50 else 512)
    images = torch.rand(2, 3, 32, 32)
    for network in (theirs, encoder):
        network(images).sum().backward()
    for layer, parameter in encoder.named_parameters():
        assert torch.equal(parameter.grad, theirs.get_parameter(layer).grad), layer
    torch.testing.assert_close(encoder.eval()(images), theirs.eval()(images), rtol=0, atol=0)


def test_vit_tiny_has_the_blocks_of_the_paper() -> None:
    """One block, by hand, with d = 192: two norms 2 * 2d = 768; q, k, v and output 4 (d^2 + d) = 148,224; MLP with 4d
    inside 2 * 4d^2 + 4d + d = 295,872; together 444,864."""
    encoder = vit_tiny(channels=3, size=32)
    blocks = encoder.encoder.layers
    assert [sum(p.numel() for p in block.parameters()) for block in blocks] == [444_864] * 12
    assert encoder.conv_proj.weight.shape == (192, 3, 4, 4)
    assert encoder.encoder.pos_embedding.shape == (1, 1 + 8 * 8, 192)
    assert encoder.feature_dim == 192
    assert not [name for name in encoder.state_dict() if name.startswith("heads")]


@pytest.mark.parametrize(("side", "width"), [(1, 4), (2, 8), (8, 192), (3, 20)])
def test_fixed_positions_equal_the_formula(side: int, width: int) -> None:
    """Number by number: a quarter each of sin and cos of the row, and sin and cos of the column."""
    n = width // 4
    for number, place in enumerate(sincos_position_embedding(side, width)):
        row, column = divmod(number, side)
        functions = [(at, function) for at in (row, column) for function in (math.sin, math.cos)]
        expected = [function(at / 10000 ** (i / n)) for at, function in functions for i in range(n)]
        assert place.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (vit_tiny, {"channels": 3, "size": 30}, "encoder.patch=4 does not divide the 30x30"),
        (vit_tiny, {"channels": 3, "size": 32, "heads": 5}, "encoder.heads=5 does not divide encoder.width=192"),
        (vit_tiny, {"channels": 3, "size": 32, "depth": 0}, "^encoder.depth=0 must be an integer from 1 to 1000$"),
        (vit_tiny, {"channels": 3, "size": 32, "positions": "x"}, "^encoder.positions=x must be sincos or learned$"),
        (
            vit_tiny,
            {"channels": 3, "size": 32, "width": 6, "heads": 1, "positions": "sincos"},
            "encoder.width=6 is not a multiple of 4; set encoder.width to a multiple of 4",
        ),
        (
            vit_small,
            {"channels": 3, "size": 32, "registers": -1},
            "^encoder.registers=-1 must be an integer from 0 to 1024$",
        ),
        (vit_base, {"channels": 3, "size": 30}, "encoder.patch=4 does not divide the 30x30"),
        (resnet18, {"channels": 3, "size": 32, "stem": "big"}, "^encoder.stem=big must be small or imagenet$"),
        (resnet18, {"channels": 0, "size": 32}, "^encoder.channels=0 must be an integer of at least 1$"),
        (conv_small, {"channels": 3, "size": 3}, "3x3"),
        (conv_small, {"channels": 3, "size": 32, "width": 0}, "^encoder.width=0 must be an integer from 1 to 65536$"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(build, settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**settings)


@pytest.mark.parametrize("file", sorted(path.stem for path in (CONF / "encoder").glob("*.yaml")))
def test_every_yaml_builds(file: str) -> None:
    node = OmegaConf.load(CONF / "encoder" / f"{file}.yaml")
    config = OmegaConf.create({"dataset": {"channels": 1, "size": 32}, "encoder": node})
    assert config.encoder.pop("weights") is None  # of the server alone
    with shapes_only():
        encoder = instantiate(config.encoder)
        assert encoder.eval()(torch.rand(1, 1, 32, 32)).shape == (1, encoder.feature_dim)


@pytest.mark.parametrize(
    ("encoder", "shape", "message"),
    [
        (conv_small(channels=1, size=8), (3, 8, 8), "encoder.channels=1 but the images have 3 channels; leave"),
        (conv_small(channels=3, size=8), (1, 8, 8), "encoder.channels=3 but the images have 1 channels; leave"),
        (resnet18(channels=3, size=8), (1, 8, 8), "at its default, or use images with 3 channels$"),
        (resnet18(channels=4, size=8, stem="imagenet"), (3, 8, 8), "encoder.channels=4"),
        (vit_tiny(channels=1, size=8, depth=1), (3, 8, 8), "encoder.channels=1"),
        (vit_tiny(channels=3, size=8, depth=1), (3, 12, 12), "encoder.size=8 but the images have 12x12 pixels; leave"),
        (vit_tiny(channels=3, size=8, depth=1), (3, 8, 12), "have 8x12 pixels.*use images of 8x8$"),
    ],
)
def test_images_of_another_form_are_one_sentence(encoder: Encoder, shape: tuple[int, ...], message: str) -> None:
    images = torch.rand(2, *shape)
    for attempt in (
        lambda: encoder.check_image_shape(images.shape),
        lambda: encoder(images),
        lambda: encoder.forward_frozen([images], torch.Generator()),
    ):
        with pytest.raises(InputError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("build", [conv_small, resnet18, resnet50])
def test_group_normalization_has_no_statistics_over_images(build) -> None:
    encoder = build(channels=1, size=8, norm="group")
    assert not list(encoder.named_buffers())
    assert not any("batch" in type(module).__name__.lower() for module in encoder.modules())
    images = torch.rand(3, 1, 8, 8)
    together = encoder.train()(images)
    alone = torch.cat([encoder.eval()(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="encoder.norm=layer is not valid; choose one of batch, group"):
        build(channels=1, size=8, norm="layer")
