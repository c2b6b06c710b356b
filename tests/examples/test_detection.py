import sys

import pytest
import torch
from torch import nn

from examples import detection
from fedssl.encoders import conv_small
from fedssl.export import save_encoder
from fedssl.seeding import torch_generator


def test_boxes_hold_exactly_the_pixels_of_their_shapes() -> None:
    generator = torch_generator(0, "scenes")
    seen = set()
    for _ in range(30):
        image, target = detection.scene(generator, channels=3, size=32)
        assert image.shape == (3, 32, 32)
        assert ((image >= 0) & (image <= 1)).all()
        assert target["masks"].sum(0).max() == 1  # none covers another
        for box, mask in zip(target["boxes"].long().tolist(), target["masks"], strict=True):
            left, top, right, bottom = box
            assert mask.sum() == mask[top:bottom, left:right].sum()
            assert mask[top].any()
            assert mask[bottom - 1].any()
            assert mask[:, left].any()
            assert mask[:, right - 1].any()
        seen |= set(target["labels"].tolist())
    assert seen == {1, 2, 3}


class Answers(nn.Module):
    """Knows what is on the images, and says so but for `mistakes`."""

    def __init__(self, targets, mistakes):
        super().__init__()
        self.targets, self.mistakes = iter(targets), mistakes

    def forward(self, images):
        target = next(self.targets)
        labels = target["labels"].clone()
        if self.mistakes:
            self.mistakes -= 1
            labels[0] = labels[0] % 3 + 1
        return [{"boxes": target["boxes"], "labels": labels, "scores": torch.full((len(labels),), 0.9)}]


@pytest.mark.parametrize("mistakes", [0, 2])
def test_a_wrong_class_is_a_shape_not_found_and_a_wrong_box(mistakes: int) -> None:
    form = {"channels": 1, "size": 32}
    _, targets = detection.batch(torch_generator(5), 4, **form)
    shapes = sum(len(target["labels"]) for target in targets)
    found, right = detection.judge(Answers(targets, mistakes), torch_generator(5), number=4, **form)
    assert found == right == (shapes - mistakes) / shapes


@pytest.fixture
def encoder(tmp_path):
    settings = {"_target_": "fedssl.encoders.conv_small", "channels": 3, "size": 32, "width": 4, "norm": "batch"}
    path = tmp_path / "encoder.pt"
    made = conv_small(channels=3, size=32, width=4)
    save_encoder(path, made, settings=settings, mean=(0.5,) * 3, std=(0.5,) * 3, metadata={})
    return path


@pytest.mark.parametrize("detector", ["faster_rcnn", pytest.param("mask_rcnn", marks=pytest.mark.heavy)])
def test_it_trains_and_says_how_good_it_is(detector, encoder, monkeypatch, capsys) -> None:
    overrides = [str(encoder), "--detector", detector, "--steps", "2", "--scratch"]
    monkeypatch.setattr(sys, "argv", ["detection.py", *overrides])
    monkeypatch.setattr(detection, "TESTS", 3)
    detection.main()
    assert "of the shapes found" in capsys.readouterr().out


@pytest.mark.heavy
def test_it_learns(encoder) -> None:
    from fedssl.detection import faster_rcnn
    from fedssl.export import load_encoder

    torch.manual_seed(0)
    form = {"channels": 3, "size": 32}
    detector = faster_rcnn(load_encoder(encoder), num_classes=4, out_channels=32, regions=32)
    before, _ = detection.judge(detector, torch_generator(0, "test"), number=30, **form)
    detection.train(detector, torch_generator(0, "train"), steps=150, **form)
    after, _ = detection.judge(detector, torch_generator(0, "test"), number=30, **form)
    assert after > before + 0.3


def test_no_encoder_is_one_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["detection.py", str(tmp_path / "none.pt")])
    with pytest.raises(SystemExit, match=r"detection: .*none.pt does not exist"):
        detection.main()
