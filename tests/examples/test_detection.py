import re
import sys

import pytest
import torch
from torch import nn

from examples import detection
from fedssl.encoders import conv_small, vit_tiny
from fedssl.errors import InputError
from fedssl.export import load_encoder, save_encoder
from fedssl.seeding import torch_generator

TARGET = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 24.0]]), "labels": torch.tensor([1])}


def test_boxes_hold_exactly_the_pixels_of_their_shapes() -> None:
    generator = torch_generator(0, "scenes")
    seen = set()
    for _ in range(30):
        image, target = detection.scene(generator, channels=3, size=32)
        assert image.shape == (3, 32, 32)
        assert ((image >= 0) & (image <= 1)).all()
        assert target["masks"].sum(0).max() == 1  # shapes do not overlap
        for box, mask in zip(target["boxes"].long().tolist(), target["masks"], strict=True):
            left, top, right, bottom = box
            assert mask.sum() == mask[top:bottom, left:right].sum()
            assert mask[top].any()
            assert mask[bottom - 1].any()
            assert mask[:, left].any()
            assert mask[:, right - 1].any()
        seen |= set(target["labels"].tolist())
    assert seen == {1, 2, 3}


@pytest.fixture
def encoder(tmp_path):
    settings = {"_target_": "fedssl.encoders.conv_small", "channels": 3, "size": 32, "width": 4, "norm": "batch"}
    path = tmp_path / "encoder.pt"
    made = conv_small(channels=3, size=32, width=4)
    save_encoder(path, made, settings=settings, mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3), metadata={})
    return path


@pytest.mark.heavy
@pytest.mark.parametrize("detector", ["faster_rcnn", pytest.param("mask_rcnn", marks=pytest.mark.heavy)])
def test_the_command_prints_recall_and_precision(detector, encoder, monkeypatch, capsys) -> None:
    overrides = [str(encoder), "--detector", detector, "--steps", "2", "--scratch"]
    monkeypatch.setattr(sys, "argv", ["detection.py", *overrides])
    monkeypatch.setattr(detection, "TESTS", 3)
    evaluate, found = detection.evaluate, []
    monkeypatch.setattr(detection, "evaluate", lambda *args, **kw: found.append(evaluate(*args, **kw)) or (0.25, 0.5))
    detection.main()
    assert len(found) == 1
    pattern = r"loss \d+\.\d\d -> \d+\.\d\d; recall 25%, precision 50%\n"
    assert re.fullmatch(pattern, capsys.readouterr().out)


def test_a_detector_without_steps_is_refused(encoder, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["detection.py", str(encoder), "--steps", "0"])
    with pytest.raises(SystemExit, match="--steps 0 is too small; give at least 1"):
        detection.main()


def test_recall_and_precision_by_hand() -> None:
    """Of all shapes one is detected, twice; another box has a wrong class, and one a low score."""
    _, targets = detection.batch(torch_generator(0, "test"), 2, channels=3, size=32)
    boxes, labels = targets[0]["boxes"][[0, 0, 0, 0]], targets[0]["labels"][[0, 0, 0, 0]]
    boxes[1, :2] += 1
    labels[2] = labels[2] % 3 + 1
    of_first = {"boxes": boxes, "labels": labels, "scores": torch.tensor([0.9, 0.6, 0.9, 0.4])}
    found = [of_first, {key: value[:0] for key, value in of_first.items()}]
    detector = nn.Module()
    detector.forward = lambda images: [found.pop(0)]
    measured = detection.evaluate(detector, torch_generator(0, "test"), number=2, channels=3, size=32)
    assert measured == (1 / sum(len(target["labels"]) for target in targets), pytest.approx(2 / 3))


@pytest.mark.heavy
def test_a_detector_learns(encoder) -> None:
    torch.manual_seed(0)
    image_shape = {"channels": 3, "size": 32}
    detector = detection.faster_rcnn(load_encoder(encoder), num_classes=4, out_channels=32, regions=32)
    before, _ = detection.evaluate(detector, torch_generator(0, "test"), number=30, **image_shape)
    detection.train(detector, torch_generator(0, "train"), steps=150, **image_shape)
    after, _ = detection.evaluate(detector, torch_generator(0, "test"), number=30, **image_shape)
    assert after > before + 0.3


def test_levels_of_the_pyramid_by_hand() -> None:
    # conv_small at 32 pixels: strides 1, 2, 2, 2, so that the maps of its blocks are 32, 16, 8 and 4 wide.
    network = conv_small(channels=3, size=32, width=4)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    backbone, levels, strides = detection.pyramid(network, size=32, out_channels=8)
    assert levels == ["blocks_0", "blocks_1", "blocks_2", "blocks_3"]
    assert strides == [1, 2, 4, 8, 16]
    assert network.training
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    maps = backbone(torch.zeros(2, 3, 32, 32))
    assert [tuple(level.shape) for level in maps.values()] == [(2, 8, side, side) for side in (32, 16, 8, 4, 2)]


def test_a_detector_uses_and_trains_the_encoder_with_its_statistics(encoder) -> None:
    network = load_encoder(encoder)
    detector = detection.faster_rcnn(network, num_classes=4, out_channels=8, regions=8)
    assert detector.transform.image_mean == pytest.approx([0.4, 0.5, 0.6])
    assert detector.transform.image_std == pytest.approx([0.1, 0.2, 0.3])
    # Anchors are four positions wide: 4 pixels at the finest level, 64 at the coarsest.
    assert detector.rpn.anchor_generator.sizes == ((4,), (8,), (16,), (32,), (64,))
    assert detector.roi_heads.box_predictor.cls_score.out_features == 4
    losses = detector.train()([torch.rand(3, 32, 32)], [TARGET])
    sum(losses.values()).backward()
    gradient = network.stage_modules()[0][0].weight.grad
    assert gradient.abs().sum() > 0
    (result,) = detector.eval()([torch.rand(3, 40, 32)])  # scaled to the encoder's size
    assert set(result) == {"boxes", "labels", "scores"}


def test_encoders_without_maps_or_statistics_are_rejected() -> None:
    with pytest.raises(InputError, match=r"ViTEncoder return tokens.*such as encoder=resnet18"):
        detection.pyramid(vit_tiny(channels=3, size=32, depth=1), size=32)
    adapted = conv_small(channels=3, size=32)
    adapted.add_adapters(bottleneck=2, blocks=None)
    with pytest.raises(InputError, match="has adapters .* which a feature pyramid on its stages would leave out"):
        detection.pyramid(adapted, size=32)
    with pytest.raises(InputError, match="load it by load_encoder"):
        detection.faster_rcnn(conv_small(channels=3, size=32), num_classes=2)
    with pytest.raises(InputError, match="load it by load_encoder"):
        detection.faster_rcnn(nn.Linear(2, 2), num_classes=2)
