"""``format=torchscript`` and ``format=torch_export``: the encoder as a program that torch runs without fedssl.

Both map images as they are, uint8 ``(batch, channels, size, size)`` with any batch, to representations. torch has
deprecated TorchScript in favour of ``torch.export``; it is for programs, such as C++ ones, that load it still.
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor

from fedssl.export.source import ExportSource, WithPreprocessing


def write_torchscript(source: ExportSource, file: Path) -> None:
    """Write what one pass over random images does; ``torch.jit.load`` reads it."""
    with warnings.catch_warnings(), torch.no_grad():
        # That it is deprecated, and that the checks of the images' size are not in it.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(WithPreprocessing(source.encoder), source.random_images(2), check_trace=False)
        torch.jit.save(traced, file)


def run_torchscript(file: Path, images: Tensor) -> Tensor:
    """Representations ``(batch, feature_dim)`` of images, by the file."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        h: Tensor = torch.jit.load(file)(images)
    return h


def exported_program(source: ExportSource) -> torch.export.ExportedProgram:
    """The encoder with its pre-processing, for any number of images at a time."""
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        return torch.export.export(WithPreprocessing(source.encoder), (source.random_images(2),), dynamic_shapes=shapes)


def write_torch_export(source: ExportSource, file: Path) -> None:
    """Write a program that ``torch.export.load`` reads."""
    torch.export.save(exported_program(source), file)


def run_torch_export(file: Path, images: Tensor) -> Tensor:
    """Representations ``(batch, feature_dim)`` of images, by the file."""
    with torch.no_grad():
        h: Tensor = torch.export.load(file).module()(images)
    return h
