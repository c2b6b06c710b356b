"""Tunings: trained layers, frozen layers, and the sharing of frozen layers by the networks of a method."""

from functools import partial

import pytest
import torch
from torch import nn

from fedssl.config.load import compose
from fedssl.encoders import conv_small, resnet18, vit_tiny
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_names, local_names
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator
from fedssl.training import method_inputs
from fedssl.tuning import bias, full, head_only, last_blocks, norm
from fedssl.views import Views

SMALL = ["encoder.width=4", "batch_size=4", "local_epochs=1", "method.projector.hidden_dim=8", "threads=1"]
TUNINGS = ("head_only", "last_blocks", "norm", "bias")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def small_vit(depth=2):
    return vit_tiny(channels=1, size=8, depth=depth, width=8, heads=2)


def make(*overrides):
    settings = compose([*SMALL, *overrides])
    return settings, build_method(settings.model)


def trained(encoder):
    return {name for name in encoder.state_dict() if name not in encoder.base_names}


def test_full_freezes_nothing():
    encoder = small_vit()
    full(encoder)
    assert not encoder.base_names
    assert all(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize("make_encoder", [small_vit, lambda: conv_small(channels=1, size=8, width=4)])
def test_head_only_freezes_everything(make_encoder):
    encoder = make_encoder()
    head_only(encoder)
    assert encoder.base_names == set(encoder.state_dict())
    assert encoder.frozen_stages == len(encoder.stage_names)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert not any(module.training for module in encoder.train().modules())


def test_last_blocks_trains_the_last_stages_and_the_tail():
    encoder = small_vit(depth=3)
    last_blocks(encoder, blocks=2)
    assert encoder.frozen_stages == 1
    starts = ("encoder.layers.encoder_layer_1.", "encoder.layers.encoder_layer_2.", "encoder.ln.")
    assert trained(encoder) == {name for name in encoder.state_dict() if name.startswith(starts)}
    resnet = resnet18(channels=3, size=8)
    last_blocks(resnet, blocks=1, freeze_statistics=False)
    assert trained(resnet) == {name for name in resnet.state_dict() if name.startswith("layer4.")}


def test_norm_trains_scale_and_shift():
    encoder = conv_small(channels=1, size=8, width=4)
    norm(encoder)
    assert trained(encoder) == {f"blocks.{block}.1.{name}" for block in range(4) for name in ("weight", "bias")}
    vit = small_vit()
    norm(vit)
    layers = [f"encoder.layers.encoder_layer_{block}.ln_{number}" for block in (0, 1) for number in (1, 2)]
    assert trained(vit) == {f"{layer}.{name}" for layer in (*layers, "encoder.ln") for name in ("weight", "bias")}


@pytest.mark.parametrize("tune", [full, norm, partial(last_blocks, blocks=1)])
def test_running_statistics_are_frozen_or_updated(tune):
    """The statistics of the last block follow the setting, whatever else is frozen."""
    names = {f"blocks.{block}.1.{name}" for block in range(4) for name in STATISTICS}
    encoder = conv_small(channels=1, size=8, width=4)
    tune(encoder, freeze_statistics=True)
    assert names <= encoder.base_names
    before = {name: encoder.state_dict()[name].clone() for name in names}
    encoder.train()(torch.rand(4, 1, 8, 8))
    assert all(torch.equal(encoder.state_dict()[name], value) for name, value in before.items())
    encoder = conv_small(channels=1, size=8, width=4)
    tune(encoder, freeze_statistics=False)
    encoder.train()(torch.rand(4, 1, 8, 8))
    assert "blocks.3.1.running_mean" in trained(encoder)
    assert not torch.equal(encoder.state_dict()["blocks.3.1.running_mean"], before["blocks.3.1.running_mean"])


def test_bias_trains_biases_with_frozen_statistics():
    encoder = conv_small(channels=1, size=8, width=4)
    bias(encoder)
    assert trained(encoder) == {f"blocks.{block}.1.bias" for block in range(4)}
    vit = small_vit()
    bias(vit)
    assert trained(vit) == {name for name in vit.state_dict() if name.endswith("bias")}
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_bias" in trained(vit)


class Bare(Encoder):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.define_stages(stages=("linear",), widths=(2,))


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        (norm, "tuning=norm but the encoder has no normalization layers with a scale; set another tuning"),
        (bias, "tuning=bias but the encoder has no biases; set another tuning"),
        (lambda encoder: last_blocks(encoder, blocks=1), "the encoder has a single stage; set tuning=full"),
        (lambda encoder: last_blocks(encoder, blocks=0), "tuning.blocks=0 must be an integer of at least 1"),
    ],
)
def test_tunings_without_anything_to_train_are_rejected(tune, message):
    with pytest.raises(InputError, match=message):
        tune(Bare())


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("target_init", ["persist", "average"])
def test_only_other_layers_are_exchanged_and_kept(tuning, target_init):
    _, method = make(f"tuning={tuning}", "method=byol", f"method.target_init={target_init}")
    names = [*exchanged_names(method), *local_names(method), *method.base_names]
    assert len(names) == len(set(names)) == len(method.named_tensors)
    encoder = {name.removeprefix("encoder.") for name in exchanged_names(method) if name.startswith("encoder.")}
    assert encoder == trained(method.encoder)
    targets = {name.removeprefix("target_encoder.") for name in names if name.startswith("target_encoder.")}
    assert targets == encoder
    assert set(method.trainable).isdisjoint(method.base_names)


def test_frozen_stages_run_once_for_all_networks():
    _, method = make("tuning=last_blocks", "method=byol")
    calls = []
    for encoder in (method.encoder, method.target_encoder):
        encoder.get_submodule("blocks.0.0").register_forward_hook(lambda *_: calls.append(1))
    views = Views.of(*torch.rand(2, 4, 1, 8, 8))
    with set_active_stages(method, depth=4, frozen=3):
        method.loss(method_inputs(method.train(), views, None, torch_generator(0)))
    assert len(calls) == 2  # one per view, instead of two


@pytest.mark.parametrize("tuning", TUNINGS)
def test_gradients_equal_those_of_the_whole_network(tuning):
    """The reference computes all gradients of the whole network, with the encoder's batch norm in eval mode."""
    _, method = make(f"tuning={tuning}", "method=byol")
    _, reference = make("method=byol")
    method.double()
    reference.double().train()
    for name, module in reference.named_modules():
        if isinstance(module, nn.BatchNorm2d) and "encoder" in name:
            module.training = False
    views = Views.of(*torch.rand(2, 6, 1, 8, 8, dtype=torch.float64, generator=torch_generator(0)))
    with set_active_stages(method, depth=4, frozen=method.encoder.frozen_stages):
        loss = method.loss(method_inputs(method.train(), views, None, torch_generator(0)))
        loss.backward()
        expected = reference.loss(views)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert method.trainable
        for name in method.trainable:
            torch.testing.assert_close(
                method.named_tensors[name].grad, reference.named_tensors[name].grad, rtol=1e-10, atol=1e-14
            )
        assert all(method.named_tensors[name].grad is None for name in method.base_names)
