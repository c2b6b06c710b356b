from pathlib import Path

import pytest
import torch
from torch import nn

from fedssl.detection import Pyramid, faster_rcnn, mask_rcnn
from fedssl.encoders import conv_small, resnet18, vit_tiny
from fedssl.errors import InputError
from fedssl.export import load_encoder, save_encoder

SETTINGS = {"_target_": "fedssl.encoders.conv_small", "channels": 3, "size": 32, "width": 4, "norm": "batch"}
TARGET = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 24.0]]), "labels": torch.tensor([1])}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("detection") / "encoder.pt"
    encoder = conv_small(channels=3, size=32, width=4)
    save_encoder(path, encoder, settings=SETTINGS, mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3), metadata={})
    return path


def test_levels_of_the_pyramid_by_hand() -> None:
    # conv_small at 32 pixels: strides 1, 2, 2, 2, so that its blocks see 32, 16, 8 and 4 positions.
    encoder = conv_small(channels=3, size=32, width=4)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    pyramid = Pyramid(encoder, size=32, out_channels=8)
    assert pyramid.names == ["blocks_0", "blocks_1", "blocks_2", "blocks_3"]
    assert pyramid.strides == [1, 2, 4, 8, 16]
    assert encoder.training
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())
    maps = pyramid(torch.zeros(2, 3, 32, 32))
    assert [tuple(each.shape) for each in maps.values()] == [(2, 8, side, side) for side in (32, 16, 8, 4, 2)]


def test_levels_of_a_resnet() -> None:
    pyramid = Pyramid(resnet18(channels=3, size=32), size=32, out_channels=8)
    assert pyramid.names == ["layer1", "layer2", "layer3", "layer4"]
    assert pyramid.strides == [1, 2, 4, 8, 16]


def test_a_detector_takes_the_encoder_with_its_weights_and_means_and_trains_it(file: Path) -> None:
    encoder = load_encoder(file)
    detector = faster_rcnn(encoder, num_classes=4, out_channels=8, regions=8)
    assert detector.backbone.encoder is encoder
    assert detector.transform.image_mean == pytest.approx([0.4, 0.5, 0.6])
    assert detector.transform.image_std == pytest.approx([0.1, 0.2, 0.3])
    # Sides of anchors are four strides: of the finest level 4 pixels, of the coarsest 64.
    assert detector.rpn.anchor_generator.sizes == ((4,), (8,), (16,), (32,), (64,))
    assert detector.roi_heads.box_predictor.cls_score.out_features == 4
    losses = detector.train()([torch.rand(3, 32, 32)], [TARGET])
    sum(losses.values()).backward()
    first = encoder.stages()[0][0].weight.grad
    assert first is not None
    assert first.abs().sum() > 0
    (answer,) = detector.eval()([torch.rand(3, 40, 32)])  # of another size, which is scaled
    assert set(answer) == {"boxes", "labels", "scores"}


def test_outlines_as_well(file: Path) -> None:
    detector = mask_rcnn(load_encoder(file), num_classes=4, out_channels=8, regions=8)
    mask = torch.zeros(1, 32, 32, dtype=torch.uint8)
    mask[0, 4:24, 4:20] = 1
    losses = detector.train()([torch.rand(3, 32, 32)], [TARGET | {"masks": mask}])
    assert losses["loss_mask"].isfinite()
    (answer,) = detector.eval()([torch.rand(3, 32, 32)])
    assert answer["masks"].shape[1:] == (1, 32, 32)


def test_what_cannot_be_a_backbone_is_refused() -> None:
    with pytest.raises(InputError, match=r"ViTEncoder make tokens.*such as encoder=resnet18"):
        Pyramid(vit_tiny(channels=3, size=32, depth=1), size=32)
    with pytest.raises(InputError, match="load it by load_encoder"):
        faster_rcnn(conv_small(channels=3, size=32), num_classes=2)
    with pytest.raises(InputError, match="load it by load_encoder"):
        faster_rcnn(nn.Linear(2, 2), num_classes=2)
