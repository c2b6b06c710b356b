"""Encoders of timm and torchvision: the libraries' outputs and names, stages, copies, sizes, files, and bad input."""

import copy

import pytest
import timm
import torch
from torchvision import models

from fedssl import encoders
from fedssl.encoders import library
from fedssl.encoders.base import ActiveStages, frozen_copy
from fedssl.errors import InputError
from fedssl.export import load_encoder, save_encoder

# Name, image size, number of stages, widths of the first and the last stage, arguments of timm.
TIMM = [
    ("test_vit", 32, 6, 64, 64, {"img_size": 32}),
    ("test_resnet", 32, 4, 32, 96, {}),
    ("test_efficientnet", 32, 5, 16, 256, {}),
    ("test_convnext", 32, 4, 24, 64, {}),
    ("test_nfnet", 64, 1, 192, 192, {}),  # of an unknown family
]


def build(name, size=32, channels=3):
    return encoders.timm(name=name, channels=channels, size=size).eval()


@pytest.mark.parametrize(("name", "size", "stages", "first", "last", "arguments"), TIMM)
def test_timm_encoders_are_timms_networks(name, size, stages, first, last, arguments):
    encoder, images = build(name, size), torch.rand(2, 3, size, size)
    theirs = timm.create_model(name, num_classes=0, **arguments).eval()
    assert list(encoder.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        h = encoder(images)
        torch.testing.assert_close(h, theirs(images), rtol=0, atol=1e-6)
    assert (len(encoder.stage_names), encoder._widths[0], encoder._widths[-1]) == (stages, first, last)
    assert h.shape == (2, encoder.feature_dim) == (2, last)


@pytest.mark.parametrize(
    ("name", "size", "stages"), [("resnet18", 64, 4), ("efficientnet_b0", 64, 7), ("mobilenet_v3_small", 64, 1)]
)
def test_torchvision_encoders_are_torchvisions_networks(name, size, stages):
    encoder, images = encoders.torchvision(name=name, channels=3, size=size).eval(), torch.rand(2, 3, size, size)
    theirs = models.get_model(name).eval()
    ours = encoder.state_dict()
    assert [key for key in theirs.state_dict() if key not in ours] in (
        ["fc.weight", "fc.bias"],
        ["classifier.1.weight", "classifier.1.bias"],
        ["classifier.3.weight", "classifier.3.bias"],
    )
    theirs.load_state_dict(ours, strict=False)
    inputs = []  # of the classifier
    list(theirs.modules())[-1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        theirs(images)
        torch.testing.assert_close(encoder(images), inputs[0], rtol=0, atol=1e-6)
    assert len(encoder.stage_names) == stages


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet", "test_convnext"])
def test_frozen_stages_and_the_others_are_the_whole_encoder(name):
    encoder, images = build(name), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        whole = encoder(images)
        for frozen in range(1, len(encoder.stage_names)):
            with encoder.run_stages(ActiveStages(len(encoder.stage_names), frozen)):
                (x,) = encoder.forward_frozen([images], torch.Generator())
                torch.testing.assert_close(encoder(x), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["test_vit", "test_nfnet"])
def test_copies_are_independent_and_frozen_copies_run_the_same_stages(name):
    encoder, images = build(name, 64), torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        before = encoder(images)
        copied, target = copy.deepcopy(encoder), frozen_copy(encoder)
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(encoder(images), before)
        assert torch.equal(target(images), before)
        assert not torch.equal(copied(images), before)
        with encoder.run_stages(ActiveStages(1)):
            assert torch.equal(target(images), encoder(images))
    assert not any(parameter.requires_grad for parameter in target.parameters())


@pytest.mark.parametrize(
    ("target", "name"), [("timm", "test_convnext"), ("timm", "test_vit"), ("torchvision", "mobilenet_v3_small")]
)
def test_saved_encoders_are_loaded(target, name, tmp_path):
    settings = {"name": name, "channels": 1, "size": 32}
    encoder = vars(encoders)[target](**settings).eval()
    save_encoder(
        tmp_path / "encoder.pt",
        encoder,
        settings={"_target_": f"fedssl.encoders.{target}", **settings},
        mean=[0.5],
        std=[0.25],
        metadata={},
    )
    loaded, images = load_encoder(tmp_path / "encoder.pt"), torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), encoder(images))


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        ("timm", "resnet19", "is not an architecture of timm .*did you mean resnet18"),
        ("timm", "hf-hub:somebody/network", "is not an architecture of timm"),
        ("timm", "test_vit.r160_in1k", "set encoder.name=test_vit encoder.weights=timm:test_vit.r160_in1k"),
        ("timm", "vgg11_", "is not an architecture of timm"),
        ("timm", "inception_v3", "cannot encode images of 3 x 32 x 32 .*set dataset.size to a size"),
        ("timm", "test_vit2", None),
        ("torchvision", "resnet19", "is not a classification network of torchvision.*did you mean"),
        ("torchvision", "fcn_resnet50", "is not a classification network"),
        ("torchvision", "squeezenet1_0", "its classifier has no linear layer"),
        ("torchvision", "googlenet", "its output is GoogLeNetOutputs instead of one vector"),
    ],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_bad_names_and_sizes_are_rejected(target, name, message):
    if message is None:  # 30 is no multiple of the patch size
        with pytest.raises(InputError, match=f"encoder.name={name} cannot encode images of 3 x 30 x 30"):
            encoders.timm(name=name, channels=3, size=30)
        return
    with pytest.raises(InputError, match=message):
        vars(encoders)[target](name=name, channels=3, size=32)


def test_timm_is_optional(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="encoder=timm needs timm; install it: uv sync --extra timm, or pip"):
        encoders.timm(name="test_vit", channels=3, size=32)


def test_the_network_follows_its_encoder():
    """To another device (which replaces parameters and buffers), to training mode, and with replaced modules."""
    encoder = build("test_vit")
    network = encoder.get_submodule("")
    assert encoder.training is network.training is False
    assert encoder.train().training is network.training is True
    encoder.head = torch.nn.Hardtanh()
    assert network.head is encoder.get_submodule("head")
    encoder.to("meta")
    assert network.cls_token.is_meta
    assert network.cls_token is dict(encoder.named_parameters())["cls_token"]
