"""Files of tensors (safetensors) and of NumPy arrays (``.npz``), which may be damaged or of another program.

Files of tensors have the format of https://github.com/huggingface/safetensors. They are memory-mapped, so reading costs
only the copy into a model. No content of any file is executed. `fedssl.safe_io.read_tensors` reads ``torch.save``.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedssl.atomic_files import atomic_write
from fedssl.digests import new_checksum
from fedssl.safe_io import MAX_TENSORS_BYTES, open_archive, open_regular_file, valid_text

if TYPE_CHECKING:  # a device's process starts without NumPy and torch
    import numpy as np
    from torch import Tensor

CHECKSUM = "checksum"  # key of the metadata
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_tensor_file(
    file: Path, tensors: "Mapping[str, Tensor]", *, metadata: Mapping[str, str] | None = None, checked: bool = False
) -> None:
    """Write tensors and text by name, atomically. With ``checked`` a checksum, which `read_tensor_file` verifies."""
    on_cpu = {name: value.detach().cpu() for name, value in tensors.items()}
    stated = {**(metadata or {}), **({CHECKSUM: _checksum(on_cpu)} if checked else {})}
    atomic_write(file, lambda stream: _write(stream, on_cpu, stated))


def _write(stream: BinaryIO, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> None:
    """Write a file without the two copies of all tensors that `safetensors.torch.save` makes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end, ordered = 0, sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # aligns every tensor
    for name, value in ordered:
        start, end = end, end + value.nbytes
        dtype = _DTYPES[str(value.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    stream.writelines(tensor_bytes(value) for _, value in ordered)


def read_tensor_file(
    file: Path, *, max_bytes: int = MAX_TENSORS_BYTES, checked: bool = False
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the memory-mapped tensors and the text of a file; exceptions for a damaged one can have any type."""
    from safetensors import safe_open

    with open_regular_file(file, max_bytes=max_bytes) as stream:
        is_utf_8 = valid_text(str(file)) == str(file)  # the library refuses other names, which only POSIX has
        with safe_open(file if is_utf_8 else f"/dev/fd/{stream.fileno()}", "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118, not a dictionary
            metadata = stored.metadata() or {}
    if checked and metadata.get(CHECKSUM) != _checksum(tensors):
        raise ValueError("the checksum is wrong")
    return tensors, metadata


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """Return the values of a tensor on the CPU as bytes; a view if it is contiguous."""
    import torch

    return tensor.flatten().view(torch.uint8).numpy().data


def _checksum(tensors: "Mapping[str, Tensor]") -> str:
    digest = new_checksum()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def write_arrays(file: Path, arrays: "Mapping[str, np.ndarray]") -> None:
    """Write arrays of numbers and strings by name, atomically."""
    import numpy as np

    columns: dict[str, Any] = dict(arrays)
    atomic_write(file, lambda stream: np.savez(stream, **columns))


def read_arrays(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> "dict[str, np.ndarray]":
    """Read arrays of numbers and strings that `write_arrays` wrote; raises as `fedssl.safe_io.read_tensors` does."""
    import numpy as np

    with open_regular_file(file, max_bytes=max_bytes) as stream, open_archive(stream) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as member:
                if np.lib.format.read_magic(member) != (1, 0):
                    raise ValueError(f"{entry.filename} is not an array")
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                if dtype.hasobject or math.prod(shape) * dtype.itemsize != entry.file_size - member.tell():
                    raise ValueError(f"{entry.filename} has another size than it declares")
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as content:
            return dict(content)
