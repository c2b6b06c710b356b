"""Encoders of timm: its networks, their names, and bad input."""

import pytest
import timm
import torch

from fedssl import encoders
from fedssl.encoders import library
from fedssl.encoders.timm_networks import build_timm
from fedssl.errors import InputError

# Name, image size, number of stages, widths of the first and the last stage, arguments of timm.
TIMM = [
    ("test_vit", 32, 6, 64, 64, {"img_size": 32}),
    ("test_resnet", 32, 4, 32, 96, {}),
    ("test_efficientnet", 32, 5, 16, 256, {}),
    ("test_convnext", 32, 4, 24, 64, {}),
    ("test_nfnet", 64, 1, 192, 192, {}),  # of an unknown family
]


@pytest.mark.parametrize(("name", "size", "stages", "first", "last", "arguments"), TIMM)
def test_timm_encoders_are_timms_networks(name, size, stages, first, last, arguments):
    encoder, images = build_timm(name, channels=3, size=size).eval(), torch.rand(2, 3, size, size)
    theirs = timm.create_model(name, num_classes=0, **arguments).eval()
    assert list(encoder.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        h = encoder(images)
        torch.testing.assert_close(h, theirs(images), rtol=0, atol=1e-6)
    assert (len(encoder.stage_names), encoder._widths[0], encoder._widths[-1]) == (stages, first, last)
    assert h.shape == (2, encoder.feature_dim) == (2, last)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("resnet19", 32, "is not an architecture of timm .*did you mean resnet18"),
        ("hf-hub:somebody/network", 32, "is not an architecture of timm"),
        ("test_vit.r160_in1k", 32, "set encoder.name=test_vit encoder.weights=timm:test_vit.r160_in1k"),
        ("vgg11_", 32, "is not an architecture of timm"),
        ("inception_v3", 32, "cannot encode images of 3 x 32 x 32 .*set dataset.size to a size"),
        ("test_vit2", 30, "encoder.name=test_vit2 cannot encode images of 3 x 30 x 30"),  # no multiple of a patch
    ],
)
def test_bad_names_and_sizes_are_rejected(name, size, message):
    with pytest.raises(InputError, match=message):
        encoders.timm(name=name, channels=3, size=size)


def test_timm_is_optional(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="encoder=timm needs timm; install it: uv sync --extra timm, or pip"):
        encoders.timm(name="test_vit", channels=3, size=32)
