"""The source of an export: an encoder, the content of its file, and its run.

``format=torch_export`` is the encoder as a program that torch runs without fedssl. It maps images ``(batch, channels,
size, size)`` with any batch size to representations. They are uint8, or float32 with the values of files if the
encoder has a window; those of an encoder with percentiles are float32, scaled to [0, 1].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.datasets.raster import convert, unit_values
from fedssl.export.encoder_file import load_encoder, read_content
from fedssl.runs.run import Run
from fedssl.seeding import torch_generator


@dataclass(frozen=True, eq=False, kw_only=True)
class ExportSource:
    """An encoder to export."""

    file: Path
    encoder: Any  # of `fedssl.export.load_encoder`
    content: Mapping[str, Any]  # of its file, see `fedssl.export.read_content`
    build: Callable[..., nn.Module] | None = None  # see `fedssl.export.load_encoder`
    run: Run | None = None  # None if only the file is known

    @classmethod
    def read(
        cls, file: Path, *, build: Callable[..., nn.Module] | None = None, run: Run | None = None
    ) -> "ExportSource":
        """Read the file of an encoder; raises `InputError` as `fedssl.export.load_encoder`."""
        return cls(file=file, encoder=load_encoder(file, build=build), content=read_content(file), build=build, run=run)

    @property
    def architecture(self) -> str:
        """Dotted name of the function that builds the encoder."""
        return str(self.content["encoder"].get("_target_"))

    def random_images(self, count: int) -> Tensor:
        """Return uint8 images ``(count, channels, size, size)``, the same in every process."""
        shape = (count, self.encoder.channels, self.encoder.size, self.encoder.size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch_generator(0, "export"))

    def inputs(self, images: Tensor) -> Tensor:
        """Convert stored images ``(batch, channels, size, size)`` to the inputs of an exported program."""
        preprocess = self.encoder.preprocess
        if preprocess.takes_bytes:
            return torch.from_numpy(convert(images.numpy(), "uint8"))
        low, high = preprocess.window or (0, 1)
        return low + (high - low) * unit_values(images)

    def metadata_dict(self) -> dict[str, Any]:
        """Return the content without weights, and ``feature_dim``, as JSON values."""
        metadata = {key: value for key, value in self.content.items() if key != "weights"}
        return {**metadata, "feature_dim": self.encoder.feature_dim}


def represent(model: nn.Module, preprocess: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Compute the representations of uint8 images by a model in eval mode, after ``preprocess``."""
    with torch.no_grad():
        h: Tensor = model(preprocess(images))
    return h


class WithPreprocessing(nn.Module):
    """An encoder with its preprocessing of fitted images, which maps `ExportSource.inputs` to representations."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        for name, values in (("mean", encoder.mean), ("std", encoder.std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))
        self.limits = encoder.preprocess.window or (0, 1)  # of float32 inputs
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return representations ``(batch, feature_dim)``."""
        low, high = self.limits
        is_stored = images.dtype == torch.uint8
        pixels = images.float() / 255 if is_stored else ((images - low) / (high - low)).nan_to_num(0).clamp(0, 1)
        h: Tensor = self.encoder((pixels - self.mean) / self.std)
        return h


def exported_program(source: ExportSource) -> torch.export.ExportedProgram:
    """Return the encoder with its standardization, for any batch size."""
    shapes = ({0: torch.export.Dim("batch")},)
    program = WithPreprocessing(source.encoder)
    with torch.no_grad():
        return torch.export.export(program, (source.inputs(source.random_images(2)),), dynamic_shapes=shapes)


def write_torch_export(source: ExportSource, file: Path) -> None:
    """Write the program for ``torch.export.load``."""
    with file.open("wb") as stream:  # torch refuses paths that are not UTF-8
        torch.export.save(exported_program(source), stream)


def run_torch_export(source: ExportSource, file: Path, images: Tensor) -> Tensor:
    """Compute the representations ``(batch, feature_dim)`` of images by the file."""
    with torch.no_grad(), file.open("rb") as stream:
        h: Tensor = torch.export.load(stream).module()(source.inputs(images))
    return h
