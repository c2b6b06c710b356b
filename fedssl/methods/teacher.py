"""A teacher that is a saved encoder of any architecture, and its features of a client's images.

Plain values describe the architecture (`fedssl.export.describe_encoder`), so that devices build it from functions of
``fedssl.encoders`` alone. Its weights are a static part of the method, see `SSLMethod.static_parts`. All processes of a
host can share files of features, so that the teacher runs once per image. A file is named after all that its features
depend on. Damaged files are computed again.
"""

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl import encoders
from fedssl.config.constraint_table import MAX_IMAGE_SIZE
from fedssl.datasets.images import ImageSource, TensorImages
from fedssl.digests import new_checksum
from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.evaluation.features import extract
from fedssl.logs import log
from fedssl.machine.devices import to_device
from fedssl.methods.base import ImageTargets
from fedssl.tensor_file import read_tensor_file, tensor_bytes, write_tensor_file

_SUFFIX, _NAME = ".safetensors", "features"  # of the files, and of the array in them
_CHUNK = 256  # images that are hashed at a time
_BATCH = 32  # images that the teacher encodes at a time, which bounds its memory
_PIECE = 1024  # images whose features are computed at a time


def build_teacher(description: Mapping[str, Any]) -> Encoder:
    """Build the frozen encoder of a description (`fedssl.export.describe_encoder`), in eval mode, untrained."""
    if not _is_description(description):
        raise InputError("method.teacher_encoder does not describe an encoder; leave it out and give teacher=FILE")
    known = {name: vars(encoders)[name] for name in encoders.__all__ if name != Encoder.__name__}
    if description["encoder"] not in known:
        raise InputError(
            f"method.teacher_encoder.encoder={description['encoder']} does not exist; a teacher is one of "
            f"{', '.join(known)}"
        )
    teacher: Encoder = known[description["encoder"]](**description["arguments"])
    if "adapters" in description:
        teacher.add_adapters(**description["adapters"])
    return teacher.requires_grad_(False).eval()


def _is_description(value: Any) -> bool:
    """Return whether a value has the form of a result of `fedssl.export.describe_encoder`."""
    if not (isinstance(value, Mapping) and value.keys() - {"adapters"} == {"encoder", "arguments", "mean", "std"}):
        return False
    adapters = value.get("adapters", {"bottleneck": 1, "blocks": 1})
    if not (isinstance(adapters, Mapping) and adapters.keys() == {"bottleneck", "blocks"}):
        return False
    arguments, statistics = value["arguments"], (value["mean"], value["std"])
    return (
        isinstance(arguments, Mapping)
        and all(type(arguments.get(key)) is int for key in ("channels", "size"))
        and 0 < arguments["size"] <= MAX_IMAGE_SIZE
        and arguments["channels"] > 0
        and all(isinstance(values, Sequence) and len(values) == arguments["channels"] for values in statistics)
        and all(isinstance(value, float) and math.isfinite(value) for values in statistics for value in values)
        and min(value["std"]) > 0
    )


class Resize(nn.Module):
    """Resizes standardized images ``(batch, channels, height, width)`` to ``size``, as `fedssl.export.Preprocess`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] == (self.size, self.size):
            return images
        return F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)


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


class TeacherFeatures:
    """Features of un-augmented images by a teacher in its own size and standardization.

    They are computed once for the images of a client, in the order of their indices, so that they do not depend on
    earlier rounds, and cached in this process, and with `store_in` in files for others. Beyond ``cache_bytes`` those of
    the least recently trained clients are dropped. A client whose features alone exceed it has those of each batch
    computed in every step. A cache is valid for one source of images and one teacher, as those of a run are; a copy of
    this object starts empty and has no files.

    ``size`` is the height and width of the teacher's images in pixels; ``mean`` and ``std`` are those of its
    standardization, per channel, of pixels in [0, 1]. Gray images become equal channels of a teacher of color images.
    """

    def __init__(self, *, size: int, mean: tuple[float, ...], std: tuple[float, ...], cache_bytes: int) -> None:
        self.mean, self.std = mean, std
        self._resize, self._cache_bytes = Resize(size), cache_bytes
        self._cached: OrderedDict[bytes, Tensor] = OrderedDict()  # by the sorted indices of the images
        self._images: Callable[[], ImageSource | None] = lambda: None
        self._files: FeatureFiles | None = None

    def __deepcopy__(self, memo: object) -> "TeacherFeatures":
        return TeacherFeatures(size=self._resize.size, mean=self.mean, std=self.std, cache_bytes=self._cache_bytes)

    def store_in(self, folder: Path) -> None:
        """Store features of at most ``cache_bytes`` in files of a folder, and read those that are there."""
        self._files = FeatureFiles(folder, self._cache_bytes)

    @property
    def nbytes(self) -> int:
        """Current size of the cache in bytes."""
        return sum(features.nbytes for features in self._cached.values())

    def targets(
        self, teacher: Encoder, images: ImageSource, indices: Tensor, *, on_step_start: Callable[[], None]
    ) -> ImageTargets:
        """Return a function that maps the indices of a batch and its images to features, see `SSLMethod.targets`."""
        device = next(teacher.parameters()).device
        network = nn.Sequential(self._resize, teacher)
        if 4 * teacher.feature_dim * len(indices) > self._cache_bytes:
            return lambda rows, batch: to_device(self._extract(network, TensorImages(batch)), device)
        ordered = indices.sort().values
        features = self._features(network, images, ordered, on_step_start)
        return lambda rows, batch: to_device(features[torch.searchsorted(ordered, rows)], device)

    def _features(
        self, network: nn.Module, images: ImageSource, ordered: Tensor, on_step_start: Callable[[], None]
    ) -> Tensor:
        """Return the features of the images at sorted indices, ``(n, dim)`` on the CPU, from the cache if possible."""
        if self._images() is not images:
            self._cached.clear()
            self._images = weakref.ref(images)
        key = ordered.numpy().tobytes()
        if key not in self._cached:
            self._cached[key] = self._stored(network, images, ordered, on_step_start)
        self._cached.move_to_end(key)
        while self.nbytes > self._cache_bytes:
            self._cached.popitem(last=False)
        return self._cached[key]

    def _stored(
        self, network: nn.Module, images: ImageSource, ordered: Tensor, on_step_start: Callable[[], None]
    ) -> Tensor:
        """Return the features of the images at sorted indices from their file, or compute them."""

        def pieces() -> Iterator[ImageSource]:
            for rows in ordered.split(_PIECE):
                on_step_start()
                yield images.subset(rows)

        def compute() -> Tensor:
            return torch.cat([self._extract(network, piece) for piece in pieces()])

        if self._files is None:
            return compute()
        key = _features_key(network, pieces(), size=self._resize.size, mean=self.mean, std=self.std)
        features = self._files.load(key, count=len(ordered))
        if features is None:
            features = compute()
            self._files.save(key, features)
        return features

    def _extract(self, network: nn.Module, images: ImageSource) -> Tensor:
        device = next(network.parameters()).device
        return extract(network, images, mean=self.mean, std=self.std, device=device, batch_size=_BATCH)


def _features_key(
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
