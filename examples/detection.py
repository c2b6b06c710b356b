"""Train torchvision's Faster R-CNN or Mask R-CNN on a federated encoder, with generated images of shapes.

    python examples/detection.py runs/NAME/encoder.pt [--detector mask_rcnn] [--steps 300] [--scratch]

Images of noise contain one to three squares, discs and crosses of random brightness. The detector is trained on new
images in each step and evaluated on 100 others. Recall counts shapes with a box of the right class and an IoU of at
least 0.5; precision counts boxes with a score above 0.5. `--scratch` reinitializes the encoder for comparison. No
stage is frozen, and batch normalization uses the statistics of small batches.

`faster_rcnn` and `mask_rcnn` work for other images, too. The stages of the encoder are the levels of a feature pyramid
(Lin et al., CVPR 2017, arXiv 1612.03144):

    detector = faster_rcnn(load_encoder("encoder.pt"), num_classes=4)  # including the background
    losses = detector(images, targets)  # images in [0, 1]; see torchvision.models.detection
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops import MultiScaleRoIAlign, box_iou, masks_to_boxes

from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.export import Preprocess, load_encoder
from fedssl.seeding import seed_generators, torch_generator

SHAPES = ("square", "disc", "cross")
TESTS = 100  # images
_ASPECT_RATIOS = (0.5, 1.0, 2.0)  # height to width of anchors, as in torchvision
_MIN_IOU, _MIN_SCORE = 0.5, 0.5


def pyramid(encoder: Encoder, *, size: int, out_channels: int = 256) -> tuple[BackboneWithFPN, list[str], list[int]]:
    """Build a feature pyramid on the encoder's stages, which return maps ``(batch, channels, height, width)``.

    The encoder is used in place, not copied. ``size`` is the side of an image in pixels, ``out_channels`` are those of
    each level. Return the backbone, the names of the stages' levels, and the pixels per position of all levels. The
    last level, "pool", has no stage: it is the previous one at half the resolution.
    """
    if encoder.patch_embedding is not None:
        raise InputError(
            f"the stages of {type(encoder).__name__} return tokens but a feature pyramid needs maps; use a "
            "convolutional encoder, such as encoder=resnet18"
        )
    if encoder.adapters:
        raise InputError(
            "the encoder has adapters (tuning=adapter), which a feature pyramid on its stages would leave out; use an "
            "encoder of another tuning"
        )
    probe = copy.deepcopy(encoder).eval()  # a copy: running statistics do not change
    channels, strides = [], []
    with torch.no_grad():
        x = probe.run_stem(next(probe.parameters()).new_zeros(1, encoder.channels, size, size))
        for stage in probe.stage_modules():
            x = stage(x)
            channels.append(x.shape[1])
            strides.append(size // x.shape[-1])
    levels = {name.rpartition(".")[2]: name.replace(".", "_") for name in encoder.stage_names}
    body = encoder.get_submodule(encoder.stage_names[0].rpartition(".")[0])  # the encoder, or its container of stages
    backbone = BackboneWithFPN(body, levels, channels, out_channels)
    return backbone, list(levels.values()), [*strides, 2 * strides[-1]]


def faster_rcnn(encoder: Encoder, *, num_classes: int, out_channels: int = 256, regions: int = 512) -> FasterRCNN:
    """Build Faster R-CNN (arXiv 1506.01497) on an encoder of `fedssl.export.load_encoder`, which is trained further.

    The detector scales images to the encoder's size (``transform.min_size``) and standardizes them by its statistics.
    Anchors of a level are squares of four positions, and two rectangles of the same area. ``num_classes`` includes the
    background, ``out_channels`` are those of the pyramid. The second stage is trained on ``regions`` per image; small
    images need fewer.
    """
    return FasterRCNN(**_parts(encoder, num_classes, out_channels, regions)[0])


def mask_rcnn(encoder: Encoder, *, num_classes: int, out_channels: int = 256, regions: int = 512) -> MaskRCNN:
    """Build Mask R-CNN (arXiv 1703.06870) on a trained encoder; parameters as in `faster_rcnn`."""
    parts, levels = _parts(encoder, num_classes, out_channels, regions)
    return MaskRCNN(**parts, mask_roi_pool=MultiScaleRoIAlign(levels, output_size=14, sampling_ratio=2))


def _parts(encoder: Encoder, num_classes: int, out_channels: int, regions: int) -> tuple[dict[str, Any], list[str]]:
    preprocess: Preprocess | None = vars(encoder).get("preprocess")  # set by load_encoder
    if preprocess is None:
        raise InputError("the encoder has no preprocessing statistics; load it by load_encoder(FILE)")
    backbone, levels, strides = pyramid(encoder, size=preprocess.size, out_channels=out_channels)
    anchors = AnchorGenerator(tuple((4 * stride,) for stride in strides), (_ASPECT_RATIOS,) * len(strides))
    parts = {
        "backbone": backbone,
        "num_classes": num_classes,
        "rpn_anchor_generator": anchors,
        "box_roi_pool": MultiScaleRoIAlign(levels, output_size=7, sampling_ratio=2),
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "min_size": preprocess.size,
        "max_size": 2 * preprocess.size,
        "box_batch_size_per_image": regions,
        "rpn_post_nms_top_n_train": 2 * regions,
        "rpn_post_nms_top_n_test": 2 * regions,
    }
    return parts, levels


DETECTORS = {"faster_rcnn": faster_rcnn, "mask_rcnn": mask_rcnn}


def scene(generator: torch.Generator, *, channels: int, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw an image ``(channels, size, size)`` in [0, 1] and its targets: ``boxes``, ``labels`` from 1, ``masks``."""
    image = 0.3 * torch.rand(channels, size, size, generator=generator)
    masks, labels = [], []
    for _ in range(int(torch.randint(1, 4, (), generator=generator))):
        kind = int(torch.randint(len(SHAPES), (), generator=generator))
        mask = shape(SHAPES[kind], generator, size=size)
        if any((mask & other).any() for other in masks):
            continue  # shapes do not overlap
        brightness = 0.4 + 0.6 * torch.rand(channels, 1, generator=generator)
        image[:, mask] = brightness.expand(-1, int(mask.sum()))
        masks.append(mask)
        labels.append(kind + 1)
    stacked = torch.stack(masks)
    boxes = masks_to_boxes(stacked) + torch.tensor([0.0, 0.0, 1.0, 1.0])  # a box ends after its last pixel
    return image, {"boxes": boxes, "labels": torch.tensor(labels), "masks": stacked.to(torch.uint8)}


def shape(kind: str, generator: torch.Generator, *, size: int) -> Tensor:
    """Draw the mask ``(size, size)`` of a shape whose width is a quarter to a half of the image."""
    radius = int(torch.randint(size // 8, size // 4 + 1, (), generator=generator))
    y, x = torch.randint(radius, size - radius, (2,), generator=generator).tolist()
    rows, columns = torch.arange(size).sub(y).view(-1, 1).abs(), torch.arange(size).sub(x).abs()
    inside = torch.maximum(rows, columns) <= radius
    if kind == "disc":
        return rows.square() + columns.square() <= radius**2
    return inside & (torch.minimum(rows, columns) <= radius // 3) if kind == "cross" else inside


def batch(generator: torch.Generator, number: int, *, channels: int, size: int) -> tuple[list[Tensor], list[Any]]:
    """Draw images and their targets."""
    scenes = [scene(generator, channels=channels, size=size) for _ in range(number)]
    return [image for image, _ in scenes], [target for _, target in scenes]


def train(detector: nn.Module, generator: torch.Generator, *, steps: int, channels: int, size: int) -> list[float]:
    """Train on new images in each step and return the losses."""
    optimizer = torch.optim.AdamW(detector.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
    detector.train()
    losses = []
    for _ in range(steps):
        loss = sum(detector(*batch(generator, 8, channels=channels, size=size)).values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(detector.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def evaluate(
    detector: nn.Module, generator: torch.Generator, *, number: int, channels: int, size: int
) -> tuple[float, float]:
    """Return recall and precision on new images."""
    images, targets = batch(generator, number, channels=channels, size=size)
    detector.eval()
    with torch.inference_mode():
        detections = [detector([image])[0] for image in images]
    recalled = correct = shapes = boxes = 0
    for detection, target in zip(detections, targets, strict=True):
        confident = detection["scores"] > _MIN_SCORE
        hits = box_iou(target["boxes"], detection["boxes"][confident]) >= _MIN_IOU
        hits &= target["labels"].view(-1, 1) == detection["labels"][confident]
        recalled, shapes = recalled + int(hits.any(1).sum()), shapes + len(target["labels"])
        correct, boxes = correct + int(hits.any(0).sum()), boxes + int(confident.sum())
    return recalled / shapes, correct / max(boxes, 1)


def main() -> None:
    """Train a detector and print its recall and precision."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--detector", choices=DETECTORS, default="faster_rcnn")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scratch", action="store_true", help="reinitialize the encoder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        if arguments.steps < 1:
            raise InputError(f"--steps {arguments.steps} is too small; give at least 1")
        encoder = load_encoder(arguments.encoder)
        seed_generators(arguments.seed, torch.device("cpu"))
        if arguments.scratch:
            for module in encoder.modules():
                if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
                    module.reset_parameters()
        detector = DETECTORS[arguments.detector](encoder, num_classes=1 + len(SHAPES), out_channels=32, regions=32)
    except InputError as error:
        sys.exit(f"detection: {error}")
    image_shape = {"channels": encoder.channels, "size": encoder.size}
    losses = train(detector, torch_generator(arguments.seed, "train"), steps=arguments.steps, **image_shape)
    recall, precision = evaluate(detector, torch_generator(arguments.seed, "test"), number=TESTS, **image_shape)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; recall {recall:.0%}, precision {precision:.0%}")


if __name__ == "__main__":
    main()
