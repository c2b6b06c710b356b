"""The estimate of a training step's memory: it needs neither tensors nor torch's compiler."""

from pathlib import Path

import pytest

from client_app.step_memory import StepMemory, estimate_step_memory
from fedssl.config.compose import resolve_config
from fedssl.config.typed_settings import client_settings
from fedssl.machine import meta_device

ENCODERS = [
    ["encoder=conv_small"],
    ["encoder=conv_small", "encoder.norm=group", "dataset.size=33"],
    ["encoder=resnet18"],
    ["encoder=resnet18", "encoder.stem=imagenet", "dataset.size=65"],
    ["encoder=resnet50", "encoder.norm=group", "encoder.stem=imagenet"],
    ["encoder=timm", "encoder.name=test_vit", "dataset.size=32"],
    ["encoder=timm", "encoder.name=test_efficientnet", "dataset.size=33"],
    ["encoder=timm", "encoder.name=resnetblur18", "dataset.size=32"],
    ["encoder=torchvision", "encoder.name=efficientnet_b0", "dataset.size=64"],
]


@pytest.mark.parametrize("overrides", ENCODERS, ids=" ".join)
def test_shapes_are_those_of_torch(overrides, monkeypatch):
    config, _ = resolve_config(["dataset=folder", "dataset.path=none", *overrides])
    settings = client_settings(config, states=Path(), partition=None)
    estimate = estimate_step_memory(settings)
    monkeypatch.setattr(meta_device, "_SHAPES", {})
    assert estimate == estimate_step_memory(settings)
    assert estimate.per_image > 2 * 3 * 28**2 * 4  # more than two views


@pytest.mark.parametrize(
    ("optimizer", "tensors"), [("sgd optimizer.momentum=0", 3), ("sgd", 4), ("adam", 5), ("adamw", 5)]
)
def test_weights_gradients_moments_and_a_copy_for_kernels(optimizer, tensors):
    """The encoder has 4 blocks of a 3x3 convolution without bias and a normalization with two numbers per channel."""
    overrides = ["encoder=conv_small", "encoder.width=8", "dataset=folder", "dataset.path=none"]
    heads = ["method.projector.num_layers=1", "method.projector.out_dim=16", "method.projector.batch_norm=false"]
    config, _ = resolve_config([*overrides, *heads, *f"optimizer={optimizer}".split()])
    convolutions = 9 * (3 * 8 + 8 * 16 + 16 * 32 + 32 * 32)
    weights = convolutions + 2 * (8 + 16 + 32 + 32) + 32 * 16 + 16  # and those of the projection
    buffers = 4 * 2 * (8 + 16 + 32 + 32) + 4 * 8  # mean, variance and a counter of int64 for each normalization
    settings = client_settings(config, states=Path(), partition=None)
    assert estimate_step_memory(settings).fixed == buffers + tensors * 4 * weights


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["strategy=moon"], 2),  # the downloaded model and the last one
        (["strategy=moon", "strategy.weight=0"], 0),
        (["strategy=scaffold"], 1),  # c - c_i
        (["strategy=feddyn"], 2),  # the gradient and the start
        (["strategy=fedprox"], 1),
        (["strategy=per_ssl"], 2),  # the global model and the start
        (["regularizer=alignment"], 1),
        (["regularizer=alignment", "regularizer.weight=0"], 0),
        (["regularizer=alignment", "strategy=scaffold"], 2),
    ],
)
def test_copies_of_models_count(overrides, copies):
    """Without normalization layers and with a projection of 32 + 1 weights, a copy is about the encoder."""
    small = ["encoder.width=8", "dataset=folder", "dataset.path=none", "method.projector.num_layers=1"]
    small += ["method.projector.out_dim=1", "method.projector.batch_norm=false", "encoder.norm=group"]

    def fixed(*more: str) -> int:
        config, _ = resolve_config([*small, *more])
        return estimate_step_memory(client_settings(config, states=Path(), partition=None)).fixed

    encoder = 4 * (9 * (3 * 8 + 8 * 16 + 16 * 32 + 32 * 32) + 2 * (8 + 16 + 32 + 32))
    assert (fixed(*overrides) - fixed()) / encoder == pytest.approx(copies, rel=0.01)


def test_the_largest_batch_is_a_power_of_two():
    step = StepMemory(fixed=100, per_image=10)
    assert step.of_batch(8) == 180
    assert [step.largest_batch(allowed) for allowed in (50, 109, 110, 179, 180)] == [0, 0, 1, 4, 8]
