"""``format=torch_export``: the encoder as a program that torch runs without fedssl.

It maps uint8 images ``(batch, channels, size, size)`` with any batch size to representations.
"""

from pathlib import Path

import torch
from torch import Tensor

from fedssl.export.source import ExportSource, WithPreprocessing


def exported_program(source: ExportSource) -> torch.export.ExportedProgram:
    """Return the encoder with its standardization, for any batch size."""
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        return torch.export.export(WithPreprocessing(source.encoder), (source.random_images(2),), dynamic_shapes=shapes)


def write_torch_export(source: ExportSource, file: Path) -> None:
    """Write the program for ``torch.export.load``."""
    torch.export.save(exported_program(source), file)


def run_torch_export(file: Path, images: Tensor) -> Tensor:
    """Compute the representations ``(batch, feature_dim)`` of images by the file."""
    with torch.no_grad():
        h: Tensor = torch.export.load(file).module()(images)
    return h
