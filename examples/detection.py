"""Find and outline shapes with the encoder of a federation: torchvision's detectors on generated images.

    python examples/detection.py runs/NAME/encoder.pt [--detector mask_rcnn] [--steps 300] [--scratch]

Images of noise hold one to three squares, discs and crosses of any brightness; the detector is trained on new ones in
every step and judged on 100 others: how many shapes are found, that is, have a box of their class that overlaps by half
(IoU), and how many of the boxes that it is sure of (score above 0.5) are right. `--scratch` draws the encoder's weights
anew, to compare with. Detectors freeze no stage here; batch normalization learns with small batches, as it is.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import box_iou, masks_to_boxes

from fedssl.detection import faster_rcnn, mask_rcnn
from fedssl.errors import InputError
from fedssl.export import load_encoder
from fedssl.seeding import seed_torch, torch_generator

SHAPES = ("square", "disc", "cross")
DETECTORS = {"faster_rcnn": faster_rcnn, "mask_rcnn": mask_rcnn}
TESTS = 100  # images
_FOUND, _SURE = 0.5, 0.5


def scene(generator: torch.Generator, *, channels: int, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """An image ``(channels, size, size)`` in [0, 1] and what is on it: ``boxes``, ``labels`` from 1, ``masks``."""
    image = 0.3 * torch.rand(channels, size, size, generator=generator)
    masks, labels = [], []
    for _ in range(int(torch.randint(1, 4, (), generator=generator))):
        kind = int(torch.randint(len(SHAPES), (), generator=generator))
        mask = shape(SHAPES[kind], generator, size=size)
        if any((mask & other).any() for other in masks):
            continue  # they do not cover each other
        brightness = 0.4 + 0.6 * torch.rand(channels, 1, generator=generator)
        image[:, mask] = brightness.expand(-1, int(mask.sum()))
        masks.append(mask)
        labels.append(kind + 1)
    together = torch.stack(masks)
    boxes = masks_to_boxes(together) + torch.tensor([0.0, 0.0, 1.0, 1.0])  # a box ends behind its last pixel
    return image, {"boxes": boxes, "labels": torch.tensor(labels), "masks": together.to(torch.uint8)}


def shape(kind: str, generator: torch.Generator, *, size: int) -> Tensor:
    """The pixels ``(size, size)`` of one shape, a quarter to a half of the image wide."""
    radius = int(torch.randint(size // 8, size // 4 + 1, (), generator=generator))
    y, x = torch.randint(radius, size - radius, (2,), generator=generator).tolist()
    rows, columns = torch.arange(size).sub(y).view(-1, 1).abs(), torch.arange(size).sub(x).abs()
    inside = torch.maximum(rows, columns) <= radius
    if kind == "disc":
        return rows.square() + columns.square() <= radius**2
    return inside & (torch.minimum(rows, columns) <= radius // 3) if kind == "cross" else inside


def batch(generator: torch.Generator, number: int, *, channels: int, size: int) -> tuple[list[Tensor], list[Any]]:
    """Images and what is on them."""
    scenes = [scene(generator, channels=channels, size=size) for _ in range(number)]
    return [image for image, _ in scenes], [target for _, target in scenes]


def train(detector: nn.Module, generator: torch.Generator, *, steps: int, channels: int, size: int) -> list[float]:
    """Train on new images in every step; the losses."""
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


def judge(
    detector: nn.Module, generator: torch.Generator, *, number: int, channels: int, size: int
) -> tuple[float, float]:
    """Share of the shapes that are found, and of the boxes that are right."""
    images, targets = batch(generator, number, channels=channels, size=size)
    detector.eval()
    with torch.inference_mode():
        answers = [detector([image])[0] for image in images]
    found = right = shapes = boxes = 0
    for answer, target in zip(answers, targets, strict=True):
        sure = answer["scores"] > _SURE
        hits = box_iou(target["boxes"], answer["boxes"][sure]) >= _FOUND
        hits &= target["labels"].view(-1, 1) == answer["labels"][sure]
        found, shapes = found + int(hits.any(1).sum()), shapes + len(target["labels"])
        right, boxes = right + int(hits.any(0).sum()), boxes + int(sure.sum())
    return found / shapes, right / max(boxes, 1)


def main() -> None:
    """Train a detector and print how good it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--detector", choices=DETECTORS, default="faster_rcnn")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scratch", action="store_true", help="draw the encoder's weights anew")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        encoder = load_encoder(arguments.encoder)
        seed_torch(arguments.seed, torch.device("cpu"))
        if arguments.scratch:
            for module in encoder.modules():
                if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
                    module.reset_parameters()
        detector = DETECTORS[arguments.detector](encoder, num_classes=1 + len(SHAPES), out_channels=32, regions=32)
    except InputError as error:
        sys.exit(f"detection: {error}")
    form = {"channels": encoder.channels, "size": encoder.size}
    losses = train(detector, torch_generator(arguments.seed, "train"), steps=arguments.steps, **form)
    found, right = judge(detector, torch_generator(arguments.seed, "test"), number=TESTS, **form)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {found:.0%} of the shapes found, {right:.0%} of the boxes right")


if __name__ == "__main__":
    main()
