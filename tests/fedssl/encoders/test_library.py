"""Encoders of other libraries: stages, copies, files and modes."""

import copy

import pytest
import torch

from fedssl import encoders
from fedssl.encoders.base import ActiveStages, frozen_copy
from fedssl.export import load_encoder, save_encoder


def build(name, size=32, channels=3):
    return encoders.timm(name=name, channels=channels, size=size).eval()


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet", "test_convnext"])
def test_frozen_stages_and_the_others_are_the_whole_encoder(name):
    encoder, images = build(name), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        whole = encoder(images)
        for frozen in range(1, len(encoder.stage_names)):
            with encoder.run_stages(ActiveStages(len(encoder.stage_names), frozen)):
                (x,) = encoder.forward_frozen([images], torch.Generator())
                torch.testing.assert_close(encoder(x), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet", "test_convnext"])
def test_weights_have_gradients_at_the_depths_where_they_run(name):
    """The head of EfficientNets runs after the last stage only, the normalization of transformers after each."""
    encoder, images = build(name), torch.rand(2, 3, 32, 32)
    parameters = dict(encoder.named_parameters())
    for depth in range(1, len(encoder.stage_names) + 1):
        encoder.zero_grad(set_to_none=True)
        with encoder.run_stages(ActiveStages(depth)):
            encoder(images).sum().backward()
        ranges = {layer: encoder.stage_range(layer) for layer in parameters}
        running = [layer for layer, stages in ranges.items() if stages.first <= depth <= stages.last]
        assert [layer for layer, weight in parameters.items() if weight.grad is not None] == running


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
    statistics = {"mean": [0.5], "std": [0.25], "metadata": {}}
    settings = {"_target_": f"fedssl.encoders.{target}", **settings}
    save_encoder(tmp_path / "encoder.pt", encoder, settings=settings, **statistics)
    loaded, images = load_encoder(tmp_path / "encoder.pt"), torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), encoder(images))


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
