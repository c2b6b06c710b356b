"""Base layers: layers of the encoder that no client trains, stored once under their digest.

The server sends base layers to a client that lacks them, which stores them in ``DIGEST.safetensors`` and verifies the
digest whenever it loads them. The name is the SHA-256 of names, dtypes, shapes and values, so that the file can be
shared by all clients of a folder and by all runs of a device.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedssl.arrays import Layers
from fedssl.digests import new_identity
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.safe_io import MAX_TENSORS_BYTES, check_tensors_like
from fedssl.tensor_file import read_tensor_file, write_tensor_file

if TYPE_CHECKING:  # a device's process starts without torch
    from torch import Tensor

MAX_ADVERTISED = 64  # digests that a device reports
KEPT = 4  # files that `save_base` keeps in a folder
_SUFFIX = ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def layers_digest(layers: Layers) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values of layers, in hexadecimal; empty without layers."""
    if not layers:
        return ""
    digest = new_identity()
    for name, array in sorted(layers.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def is_digest(text: str) -> bool:
    """Return whether text has the form of a digest, and may therefore be part of a file name."""
    return _DIGEST.fullmatch(text) is not None


def check_base(base: Layers, *, like: "Mapping[str, Tensor]", digest: str) -> None:
    """Raise `ValueError` unless base layers have names, shapes and dtypes of ``like``, finite values and the digest."""
    import torch

    if base.keys() != like.keys():
        mismatched = min(base.keys() ^ like.keys())
        raise ValueError(f"they {'have' if mismatched in base else 'lack'} {mismatched}")
    check_tensors_like({name: torch.from_numpy(array) for name, array in base.items()}, like)
    if layers_digest(base) != digest:
        raise ValueError(f"their digest is not {digest}")


def save_base(folder: Path, base: Layers, *, digest: str) -> None:
    """Write base layers to the folder, unless they are there intact, and delete all but the `KEPT` newest files."""
    import torch

    file = folder / f"{digest}{_SUFFIX}"
    if file.exists() and not _is_intact(file, file.stat().st_mtime_ns):
        log.warning("%s is damaged: it is written again", file)
        file.unlink()
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tensor_file(file, {name: torch.from_numpy(np.array(array)) for name, array in base.items()})
        others = [other for other in _files(folder) if other != file]
        for other in others[KEPT - 1 :]:
            log.info("%s is deleted: the %d newest base layers are kept", other, KEPT)
            other.unlink(missing_ok=True)


def load_base(folders: Iterable[Path], *, like: "Mapping[str, Tensor]", digest: str) -> Layers | None:
    """Return the base layers of this digest from the first folder that has them intact; None if there are none.

    A damaged file is logged. Raises `ValueError` for layers that do not fit ``like``.
    """
    for folder in folders:
        file = folder / f"{digest}{_SUFFIX}"
        if not file.exists():
            continue
        try:
            base = _read(file, max_bytes=2**24 + 2 * sum(tensor.nbytes for tensor in like.values()))
            check_base(base, like=like, digest=digest)
        except Exception as error:  # a damaged file can raise anything
            log.warning("%s is damaged (%s)", file, error)
        else:
            return base
    return None


def read_base(folder: Path) -> Layers:
    """Return the base layers of a run folder; raises `InputError` if there are none, or if they are damaged."""
    digests = stored_digests([folder])
    if not digests:
        raise InputError(f"{folder} lacks the base layers of the run; restore them from a copy of the run folder")
    return _read(folder / f"{digests[0]}{_SUFFIX}", max_bytes=MAX_TENSORS_BYTES)


def stored_digests(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return the digests of the intact base layers in these folders, at most `MAX_ADVERTISED`, the newest first."""
    files = _files(*folders)
    intact = [file.stem for file in files[:MAX_ADVERTISED] if _is_intact(file, file.stat().st_mtime_ns)]
    return tuple(dict.fromkeys(intact))


def _files(*folders: Path) -> list[Path]:
    """Return the files of base layers in these folders, the newest first."""
    files = [file for folder in folders for file in folder.glob(f"*{_SUFFIX}") if is_digest(file.stem)]
    return sorted(files, key=lambda file: -file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _is_intact(file: Path, changed: int) -> bool:
    """Return whether a file, which was last changed at this time, has the layers of its digest."""
    try:
        return layers_digest(_read(file, max_bytes=MAX_TENSORS_BYTES)) == file.stem
    except Exception as error:  # a damaged file can raise anything
        log.warning("%s is damaged (%s)", file, error)
        return False


def _read(file: Path, *, max_bytes: int) -> Layers:
    """Read a file, whose layers are memory-mapped; raises any exception if it is damaged."""
    tensors, _ = read_tensor_file(file, max_bytes=max_bytes)
    return {name: tensor.numpy() for name, tensor in tensors.items()}
