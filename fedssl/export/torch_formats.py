"""``format=torchscript`` and ``format=torch_export``: the encoder as a program that torch runs without fedssl.

Both map uint8 images ``(batch, channels, size, size)`` with any batch size to representations. torch has deprecated
TorchScript in favor of ``torch.export``; it is for programs that still load it, such as C++ programs.
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor

from fedssl.export.source import ExportSource, WithPreprocessing


def write_torchscript(source: ExportSource, file: Path) -> None:
    """Trace a pass over random images and write the program for ``torch.jit.load``."""
    with warnings.catch_warnings(), torch.no_grad():
        # Warnings on the deprecation, and on checks of the image size that tracing drops.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(WithPreprocessing(source.encoder), source.random_images(2), check_trace=False)
        torch.jit.save(traced, file)


def run_torchscript(file: Path, images: Tensor) -> Tensor:
    """Compute the representations ``(batch, feature_dim)`` of images by the file."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        h: Tensor = torch.jit.load(file)(images)
    return h


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
