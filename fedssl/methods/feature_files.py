"""Files of a teacher's features, which all processes of a host share, so that the teacher runs once per image.

A file is named after all that its features depend on. Damaged files are computed again.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedssl.datasets.images import ImageSource
from fedssl.digests import new_checksum
from fedssl.tensor_file import read_tensor_file, tensor_bytes, write_tensor_file

log = logging.getLogger("fedssl")

_SUFFIX, _NAME = ".safetensors", "features"
_CHUNK = 256  # images that are hashed at a time


def features_key(
    network: nn.Module, pieces: Iterable[ImageSource], *, size: int, mean: Sequence[float], std: Sequence[float]
) -> str:
    """Return a digest of network, images, preprocessing, torch's version and the kind of device, in hexadecimal."""
    device = next(network.parameters()).device.type
    hashed = new_checksum(repr((torch.__version__, device, network, size, tuple(mean), tuple(std))).encode())
    for name, tensor in network.state_dict().items():
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor_bytes(tensor.cpu()))
    for images in pieces:
        hashed.update(repr(images.shape).encode())
        for chunk in images.chunks(_CHUNK):
            hashed.update(tensor_bytes(chunk.cpu()))
    return hashed.hexdigest()


@dataclass(frozen=True)
class FeatureFiles:
    """Files of at most ``max_bytes`` in a folder, of which the least recently used are deleted first."""

    folder: Path
    max_bytes: int

    def load(self, key: str, *, count: int) -> Tensor | None:
        """Return the features of ``count`` images, float32 ``(count, dim)``; None without an intact file."""
        file = self.folder / f"{key}{_SUFFIX}"
        try:
            features = read_tensor_file(file, max_bytes=self.max_bytes, checked=True)[0][_NAME]
            if features.dtype != torch.float32 or len(features) != count:
                raise ValueError("unexpected content")
            file.touch()
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file can raise anything
            log.warning("%s is damaged (%s): the teacher computes its features again", file, error)
            return None
        return features

    def save(self, key: str, features: Tensor) -> None:
        """Write features. A folder that cannot be written is logged."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tensor_file(self.folder / f"{key}{_SUFFIX}", {_NAME: features}, checked=True)
            self._delete_oldest()
        except OSError as error:
            log.warning("%s cannot be written (%s): every process runs the teacher", self.folder, error.strerror)

    def _delete_oldest(self) -> None:
        statuses = {}
        for file in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process has deleted it
                statuses[file] = file.stat()
        size = sum(status.st_size for status in statuses.values())
        for file in sorted(statuses, key=lambda file: statuses[file].st_mtime_ns):
            if size <= self.max_bytes:
                return
            file.unlink(missing_ok=True)
            size -= statuses[file].st_size
