"""Reading of checkpoint files, which are untrusted: tensors by name, and no code."""

import codecs
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedssl.datasets.raster import pixel_settings
from fedssl.errors import InputError, reason_of
from fedssl.export.weights import read_metadata
from fedssl.safe_io import LFS_POINTER, MAX_TENSORS_BYTES, read_start, read_tensors
from fedssl.tensor_file import read_tensor_file

_MAX_BYTES = MAX_TENSORS_BYTES // 4
# Files that downloads leave in place of a checkpoint, by their first bytes.
_OTHER_FILES = {
    LFS_POINTER: "a pointer of Git LFS; fetch the file with git lfs pull",
    b"<": "a web page; download the file again",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Tensors by dotted name, and the statistics of the training images if they are known."""

    tensors: Mapping[str, Tensor]
    mean: tuple[float, ...] | None = None  # per channel, of pixels in [0, 1]
    std: tuple[float, ...] | None = None
    # Settings of the pixels of these images, see `fedssl.datasets.raster.PixelSettings`; empty if unknown.
    pixels: Mapping[str, Any] = field(default_factory=dict)
    heads: int | None = None  # of attention, if a file of this project states it


def read_checkpoint(file: Path) -> Checkpoint:
    """Read a file of ``torch.save`` or safetensors; raise an `InputError` if it has no tensors or is not readable.

    Nested dictionaries become dotted names: ``{"state_dict": {"fc.weight": w}}`` has ``state_dict.fc.weight``.
    """
    try:
        content, metadata = _read(file)
        tensors = dict(_flatten(content))
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"encoder.weights={file} does not exist; set it to a checkpoint or a run folder") from error
    except OSError as error:
        raise InputError(
            f"encoder.weights={file} cannot be read ({reason_of(error)}); set it to another file"
        ) from error
    except Exception as error:  # a damaged or foreign file can raise any exception
        text = read_start(file, 64).removeprefix(codecs.BOM_UTF8).lstrip()
        for start, problem in _OTHER_FILES.items():
            if text.startswith(start):
                raise InputError(f"encoder.weights={file} is {problem}") from error
        raise InputError(
            f"encoder.weights={file} is damaged or has more than tensors and plain values ({reason_of(error)}); store "
            "its state dict alone with torch.save(network.state_dict(), FILE)"
        ) from error
    if not tensors:
        raise InputError(f"encoder.weights={file} has no tensors; set it to a checkpoint with a state dict")
    mean, std = (_statistics(metadata.get(key)) for key in ("mean", "std"))
    arguments = metadata.get("encoder")
    heads = arguments.get("heads") if isinstance(arguments, dict) else None
    about = metadata.get("metadata")
    return Checkpoint(
        tensors=tensors,
        mean=mean,
        std=std,
        pixels=pixel_settings(about) if isinstance(about, dict) else {},
        heads=heads if isinstance(heads, int) else None,
    )


def _read(file: Path) -> tuple[Any, Mapping[str, Any]]:
    """Return the content of a file, and what an encoder's file of this project states about it."""
    if file.suffix == ".safetensors":
        tensors, stated = read_tensor_file(file, max_bytes=_MAX_BYTES)
        return tensors, read_metadata(stated, file)
    content = read_tensors(file, max_bytes=_MAX_BYTES, training_script=True)
    is_own = isinstance(content, dict) and str(content.get("format", "")).startswith("fedssl-encoder")
    return content, content if is_own else {}


def _flatten(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix.removesuffix("."), value
    elif isinstance(value, Mapping) and depth < 8:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}{key}.", depth + 1)


def _statistics(values: Any) -> tuple[float, ...] | None:
    """Return numbers per channel, or None if there are none."""
    if not isinstance(values, list) or not all(isinstance(value, float) and math.isfinite(value) for value in values):
        return None
    return tuple(values) or None
