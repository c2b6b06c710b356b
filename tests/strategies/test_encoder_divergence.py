"""The distance of DAPU and FedEMA: by hand, slowly, and with every encoder in every stage of every schedule."""

from functools import partial
from math import sqrt

import pytest
import torch
from torch import nn

from fedssl.config.load import compose
from fedssl.config.overrides import config_groups
from fedssl.encoders import Encoder, vit_tiny
from fedssl.methods.base import SSLMethod, build_method
from fedssl.methods.heads import MLP
from fedssl.methods.moco_v3 import MoCoV3
from fedssl.model_arrays import copy_layers
from fedssl.schedule.phases import make_phases
from fedssl.schedule.stages import set_active_stages
from strategies.encoder_divergence import DISTANCES, distance_names, encoder_divergence

HEAD = partial(MLP, hidden_dim=6, out_dim=4)


class Small(Encoder):
    """Two kernels, a shortcut's, a normalisation and a vector."""

    feature_dim = 2

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, 2, bias=False)
        self.bn1 = nn.BatchNorm2d(1)
        self.conv2 = nn.Conv2d(1, 2, 1, bias=False)
        self.downsample = nn.Conv2d(1, 1, 1, bias=False)
        self.token = nn.Parameter(torch.ones(2))


class Patches(Small):
    patch_embedding = "conv1"


class Plain(SSLMethod):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.projector = encoder, nn.Conv2d(1, 1, 1, bias=False)


MOVES = {
    "encoder.conv1.weight": torch.tensor([1.0, 2, -2, 4]).view(1, 1, 2, 2),
    "encoder.bn1.weight": -3,
    "encoder.bn1.running_mean": 100,
    "encoder.bn1.num_batches_tracked": 100,
    "encoder.conv2.weight": torch.tensor([6.0, 8]).view(2, 1, 1, 1),
    "encoder.downsample.weight": 2,
    "encoder.token": torch.tensor([0.0, 1]),
    "projector.weight": 100,
}


# Kernels: conv1 moves by (1, 2, -2, 4), norm 5, and conv2 by (6, 8), norm 10: their mean is 7.5. Squares over all
# weights: 25 + 100, the shortcut's kernel 2^2 = 4, the normalisation's scale 3^2 = 9, its shift 0, the vector (0, 1)
# has 1; together 139. Neither statistics nor counters nor the projector count.
#
# If conv1 is a patch embedding, only conv2 is left: 10. Without conv2 then no kernel is trained: the mean over conv1,
# scale, shift, shortcut and vector of 5, 3, 0, 2 and 1 is 11 / 5 = 2.2, and without conv1 that of the last four 1.5.
@pytest.mark.parametrize(
    ("encoder", "frozen", "distance", "expected"),
    [
        (Small, (), "mean_conv_l2", 7.5),
        (Small, (), "squared_l2", 139),
        (Small, ("conv1",), "mean_conv_l2", 10),
        (Small, ("conv1",), "squared_l2", 114),
        (Patches, (), "mean_conv_l2", 10),
        (Patches, (), "squared_l2", 139),
        (Patches, ("conv2",), "mean_conv_l2", 2.2),
        (Patches, ("conv1", "conv2"), "mean_conv_l2", 1.5),
    ],
)
def test_distance_by_hand(encoder, frozen, distance, expected):
    method = Plain(encoder())
    for name in frozen:
        method.encoder.get_submodule(name).requires_grad_(False)
    start = copy_layers(method, method.named_tensors)
    assert encoder_divergence(method, start, distance=distance) == 0
    with torch.no_grad():
        for name, move in MOVES.items():
            method.named_tensors[name].add_(move)
    assert encoder_divergence(method, start, distance=distance) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("patch", [1, 4])
@pytest.mark.parametrize("train", [True, False])
def test_a_transformer_is_compared_as_a_whole(patch, train):
    vit = vit_tiny(channels=1, size=8, patch=patch, depth=2, width=6, heads=1)
    method = MoCoV3(vit, projector=HEAD, predictor=HEAD, temperature=0.2, ema_decay=0.9, train_patches=train)
    names = set(distance_names(method, distance="mean_conv_l2"))
    assert names == {f"encoder.{name}" for name, parameter in vit.named_parameters() if parameter.requires_grad}
    assert ("encoder.conv_proj.weight" in names) == train
    assert {"encoder.encoder.layers.encoder_layer_0.mlp.0.weight", "encoder.encoder.ln.bias"} < names


VIT = ["encoder.patch=4", "encoder.width=16", "encoder.depth=3", "encoder.heads=2"]
SMALL = {"conv_small": ["encoder.width=4"], "vit_tiny": VIT, "vit_small": VIT, "vit_base": VIT}
SMALL["timm"] = ["encoder.name=resnet18"]


def encoders_and_schedules():
    for encoder in config_groups()["encoder"]:
        for schedule in config_groups()["schedule"]:
            default = (encoder, schedule) in (("conv_small", "progressive"), ("conv_small", "end_to_end"))
            yield pytest.param(encoder, schedule, marks=[] if default else pytest.mark.heavy)


@pytest.mark.parametrize(("encoder", "schedule"), list(encoders_and_schedules()))
def test_weights_that_move_are_seen_in_every_stage(encoder, schedule):
    overrides = [f"encoder={encoder}", f"schedule={schedule}", *SMALL.get(encoder, [])]
    settings = compose([*overrides, "method.projector.hidden_dim=8"]).model
    method = build_method(settings)
    phases = make_phases(settings.schedule, stages=len(method.encoder.stage_names))
    assert schedule == "end_to_end" or len(phases) > 2
    random = torch.Generator().manual_seed(0)
    for phase, distance in [(phase, distance) for phase in phases for distance in DISTANCES]:
        with set_active_stages(method, depth=phase.depth, frozen=phase.frozen):
            start, found = copy_layers(method, method.named_tensors), []
            names = distance_names(method, distance=distance)
            trained = [tensor for name, tensor in method.named_tensors.items() if name in names]
            for size in (0, 0.1, 10):
                with torch.no_grad():
                    for parameter in method.parameters():
                        if parameter.requires_grad:
                            parameter.add_(size * torch.randn(parameter.shape, generator=random))
                found.append(encoder_divergence(method, start, distance=distance))
            # A weight of n numbers, each moved by N(0, s^2), has moved by about s sqrt(n), and by s^2 n squared.
            assert found[0] == 0
            sizes = [tensor.numel() for tensor in trained]
            for size, distance_found in zip((0.1, 10), found[1:], strict=True):
                if distance == "squared_l2":
                    expected = size**2 * sum(sizes)
                else:
                    expected = size * sum(map(sqrt, sizes)) / len(sizes)
                assert distance_found == pytest.approx(expected, rel=0.2)
