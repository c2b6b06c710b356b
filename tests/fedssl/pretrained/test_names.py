"""Which tensors of a checkpoint are the encoder's: prefixes, layouts of other libraries, heads, and other networks."""

import re

import pytest
import timm
import torchvision

from fedssl.encoders import resnet18, vit_tiny
from fedssl.encoders import timm as timm_encoder
from fedssl.pretrained.names import TO_TIMM_VIT, known_statistics, match_names, substitute

RESNET = list(resnet18(channels=3, size=32).state_dict())
FULL = list(torchvision.models.resnet18().state_dict())  # with fc


def prefixed(prefix, names=RESNET):
    return [prefix + name for name in names]


@pytest.mark.parametrize(
    ("names", "prefix", "ignored"),
    [
        (FULL, "", {"fc": 2}),
        (prefixed("state_dict.", FULL), "state_dict.", {"fc": 2}),
        (  # MoCo (https://github.com/facebookresearch/moco)
            [
                *(name for part in ("k", "q") for name in prefixed(f"state_dict.module.encoder_{part}.", FULL)),
                *("state_dict.module.queue", "optimizer.state.0.momentum_buffer"),
            ],
            "state_dict.module.encoder_q.",
            {"fc": 2, "state_dict": 123, "optimizer": 1},  # encoder_k has 122 tensors, and there is the queue
        ),
        (  # DINO (https://github.com/facebookresearch/dino)
            [
                *prefixed("student.module.backbone."),
                *("student.module.head.mlp.0.weight", "teacher.head.mlp.0.weight"),
                *prefixed("teacher.backbone."),
            ],
            "teacher.backbone.",
            {"student": 121, "teacher": 1},
        ),
        (  # SimCLR (https://github.com/sthalles/SimCLR)
            [*prefixed("state_dict.backbone."), "state_dict.backbone.fc.0.weight", "state_dict.backbone.fc.2.weight"],
            "state_dict.backbone.",
            {"fc": 2},
        ),
        (  # BYOL in lightly
            [*prefixed("backbone."), *prefixed("backbone_momentum."), "projection_head.layers.0.weight"],
            "backbone.",
            {"backbone_momentum": 120, "projection_head": 1},
        ),
        (  # this project's encoder file
            prefixed("weights."),
            "weights.",
            {},
        ),
    ],
)
def test_prefixes_of_checkpoints(names, prefix, ignored):
    match = match_names(names, RESNET)
    assert (match.prefix, match.unexpected, dict(match.ignored)) == (prefix, [], ignored)
    assert match.sources == {name: prefix + name for name in RESNET}


def test_timms_and_torchvisions_vision_transformers():
    ours = list(vit_tiny(channels=3, size=32, depth=2, registers=2).state_dict())
    theirs = list(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, reg_tokens=2).state_dict())
    match = match_names(theirs, ours)
    assert match.sources["encoder.layers.encoder_layer_1.self_attention.in_proj_bias"] == "blocks.1.attn.qkv.bias"
    assert sorted(match.sources) == sorted(ours)
    assert (match.unexpected, match.ignored) == ([], {"head": 2})
    back = match_names(ours, [name for name in theirs if not name.startswith("head.")])
    assert {new: old for old, new in match.sources.items()} == back.sources
    assert [substitute(name, TO_TIMM_VIT) for name in match.sources] == list(match.sources.values())


def efficientnet_pytorch_names(repeats, excitation):
    """The names of https://github.com/lukemelas/EfficientNet-PyTorch; the first ``repeats[0]`` blocks do not expand."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["_conv_stem.weight", *(f"_bn0.{name}" for name in norm)]
    for number in range(sum(repeats)):
        parts = ["depthwise_conv", "bn1", *(("se_reduce", "se_expand") if excitation else ()), "project_conv", "bn2"]
        parts = ["expand_conv", "bn0", *parts] if number >= repeats[0] else parts
        for part in parts:
            tensors = norm if part.startswith("bn") else ("weight", "bias") if part.startswith("se") else ("weight",)
            names += [f"_blocks.{number}._{part}.{name}" for name in tensors]
    return [*names, "_conv_head.weight", *(f"_bn1.{name}" for name in norm), "_fc.weight", "_fc.bias"]


@pytest.mark.parametrize(("name", "excitation"), [("efficientnet_lite0", False), ("efficientnet_b0", True)])
def test_efficientnet_pytorch_has_the_names_of_timms_blocks(name, excitation):
    """The repeats of the stages are those of arXiv 1905.11946, Table 1: 1, 2, 2, 3, 3, 4, 1."""
    ours = list(timm_encoder(name=name, channels=3, size=64).state_dict())
    match = match_names(efficientnet_pytorch_names([1, 2, 2, 3, 3, 4, 1], excitation), ours)
    assert sorted(match.sources) == sorted(ours)
    assert (match.unexpected, match.ignored) == ([], {"classifier": 2})
    assert match.sources["blocks.0.0.conv_pw.weight"] == "_blocks.0._project_conv.weight"  # no expansion
    assert match.sources["blocks.1.0.conv_pw.weight"] == "_blocks.1._expand_conv.weight"
    assert match.sources["blocks.3.2.bn3.bias"] == "_blocks.7._bn2.bias"  # the third block after 1 + 2 + 2
    assert match.sources["bn2.weight"] == "_bn1.weight"
    assert known_statistics(match.sources.values()) == (None if excitation else (0.5, 0.5))


TIMM_VIT = ["cls_token", "pos_embed", "patch_embed.proj.weight", "norm.bias"]
TIMM_VIT += [f"blocks.{number}.{part}.weight" for number in range(3) for part in ("norm1", "attn.qkv", "mlp.fc1")]


@pytest.mark.parametrize(
    ("names", "prefix", "ignored"),
    [
        (  # MAE (https://github.com/facebookresearch/mae) and forks: the decoder has the prefix of the encoder
            prefixed("model.", [*TIMM_VIT, "mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.weight"]),
            "model.",
            {"mask_token": 1, "decoder_pos_embed": 1, "decoder_blocks": 1},
        ),
        (  # iBOT's student (https://github.com/bytedance/ibot)
            [*prefixed("student.module.backbone.", [*TIMM_VIT, "masked_embed"]), "student.module.head.mlp.0.weight"],
            "student.module.backbone.",
            {"masked_embed": 1, "student": 1},
        ),
        (  # DINOv2's training: blocks in chunks, whose numbers are those of the network
            prefixed(
                "teacher.backbone.", [re.sub(r"^blocks\.(\d)", r"blocks.0.\1", x) for x in TIMM_VIT] + ["mask_token"]
            ),
            "teacher.backbone.",
            {"mask_token": 1},
        ),
        (  # torch.compile and FSDP
            prefixed(
                "_orig_mod.model._fsdp_wrapped_module.",
                [re.sub(r"^blocks\.\d", r"\g<0>._checkpoint_wrapped_module", name) for name in TIMM_VIT],
            ),
            "model.",
            {},
        ),
    ],
)
def test_vision_transformers_of_other_programs(names, prefix, ignored):
    match = match_names(names, TIMM_VIT)
    assert (match.prefix, match.unexpected, dict(match.ignored), match.alternatives) == (prefix, [], ignored, [])
    assert sorted(match.sources) == sorted(TIMM_VIT)
    assert set(match.sources.values()) <= set(names)
    block = match.sources["blocks.2.mlp.fc1.weight"]
    assert "2." in block
    assert block.endswith("mlp.fc1.weight")


def test_the_other_encoder_of_ijepa_is_named():
    """https://github.com/facebookresearch/ijepa saves the context encoder, the predictor and the target encoder."""
    networks = ("encoder", "target_encoder", "predictor")
    names = [name for network in networks for name in prefixed(f"{network}.module.", TIMM_VIT)]
    names = [name for name in names if not name.startswith("predictor.module.blocks")]
    match = match_names(names, TIMM_VIT)
    assert (match.prefix, match.alternatives) == ("encoder.module.", ["target_encoder.module."])


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_names_changes_nothing(order):
    names = [*prefixed("encoder_q."), *prefixed("encoder_k.")][::order]
    assert match_names(names, RESNET).prefix == "encoder_q."


def test_numbers_within_chunks_do_not_overwrite_blocks():
    names = ["cls_token", *(f"blocks.{chunk}.{number}.norm1.weight" for chunk in range(2) for number in range(2))]
    match = match_names(names, ["cls_token", *(f"blocks.{number}.norm1.weight" for number in range(4))])
    assert list(match.sources) == ["cls_token"]
    assert len(match.unexpected) == 4
