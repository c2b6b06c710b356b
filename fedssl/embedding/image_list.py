"""All images of a path, whatever their split, in the order of their names; they are decoded ahead of their use."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedssl.config.constraints import check_arguments
from fedssl.config.literal import user_path
from fedssl.datasets.decoding import MAX_PIXELS, THREADS, VERSION, Bands, Decoding, Encoded, Page, unreadable_reason
from fedssl.datasets.folder_layout import list_split
from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.image_index import BATCH, ImageIndex, Place, Query, SequenceIndex, file_line
from fedssl.datasets.path_index import index_source
from fedssl.datasets.raster import PIXELS, convert
from fedssl.datasets.sources import ARRAYS, IMAGES, TABLES, Source, find
from fedssl.datasets.splits import HELD_OUT
from fedssl.datasets.tables import as_written, schema_of
from fedssl.digests import checksum, new_identity
from fedssl.errors import InputError
from fedssl.machine.process import available_cores
from fedssl.safe_io import FilePath, valid_text

_AHEAD, _AHEAD_BYTES = 4, 2**26  # blocks, and bytes of decoded images, that wait for the encoder, but at least a block
_SPLITS = ("train", *HELD_OUT, "unlabeled")

# Settings of dataset=folder with their defaults here; folders=auto: classes where the layout has them.
SETTINGS: Mapping[str, Any] = {
    "image": None,
    "label": "label",
    "group": None,
    "skip_missing": False,
    "folders": "auto",
    "pages": "auto",
    "max_pixels": MAX_PIXELS,
    "video_interval": 1.0,
    **PIXELS,
}
_OF_DECODING = ("max_pixels", "video_interval", *PIXELS)


class Block(NamedTuple):
    """Successive images, decoded."""

    end: int  # row after the last
    rows: np.ndarray  # of the readable images, int64 ``(n,)``
    images: np.ndarray  # ``(n, channels, size, size)``
    unreadable: dict[int, str]  # reasons by row

    def digests(self) -> list[str]:
        """Return a text for each readable image, equal for equal pixels, also in lists of other dtypes."""
        return [checksum(convert(image, "float32").tobytes()) for image in self.images]


@dataclass(frozen=True)
class ImageList:
    """Images of a path, found but not decoded. Rows are their numbers, from 0."""

    root: Path
    parts: Sequence[ImageIndex]  # several for the splits of an NPZ file
    labels: np.ndarray | None  # int64, ``(n,)``, `NO_LABEL` if unknown; None if no image has one
    classes: tuple[str, ...]  # ``classes[label]``; empty if unknown

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *(part.count for part in self.parts)])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about files that are not read, or that may be misread."""
        return tuple(dict.fromkeys(chain.from_iterable(part.warnings for part in self.parts)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a decoded image."""
        _, *shape = self.parts[0].shape
        return shape[0], shape[1], shape[2]

    def _split(self, rows: np.ndarray) -> Iterator[tuple[ImageIndex, np.ndarray]]:
        """Yield each part with its rows among ascending ``rows``."""
        for part, start, end in zip(self.parts, self._starts, self._starts[1:], strict=False):
            yield part, rows[np.searchsorted(rows, start) : np.searchsorted(rows, end)] - start

    def at(self, rows: np.ndarray) -> "ImageList":
        """Return the images at ascending ``rows``."""
        parts = [part.at(chosen) for part, chosen in self._split(rows) if len(chosen)]
        return replace(self, parts=parts, labels=None if self.labels is None else self.labels[rows])

    def places(self, rows: np.ndarray) -> list[Place]:
        """Return the files of the images at ascending ``rows``, below the folder of the images."""
        found = chain.from_iterable(part.places(chosen) for part, chosen in self._split(rows))
        return [Place(self._below(file), part) for file, part in found]

    def names(self, rows: np.ndarray) -> list[str]:
        """Return the names of the images at ascending ``rows``, as text that UTF-8 can encode."""
        return [valid_text(place.name) for place in self.places(rows)]

    def _below(self, file: FilePath) -> str:
        below = str(file).removeprefix(f"{self.root}/")
        if below != str(file) and "/." not in f"/{below}" and "//" not in f"/{below}":  # a tenth of pathlib's time
            return below
        path = Path(file)
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def groups(self, rows: np.ndarray) -> list[str] | None:
        """Return the names of the groups of the images at ascending ``rows``; None if they have none."""
        if any(part.groups is None for part in self.parts):
            return None
        pairs = [(part, part.groups[chosen]) for part, chosen in self._split(rows) if part.groups is not None]
        return [self._below(part.group_names[group]) for part, groups in pairs for group in groups]

    def values(self, name: str) -> list[Any]:
        """Return a further column of all images; `InputError` if the source has none."""
        return list(chain.from_iterable(part.values(name) for part in self.parts))

    def values_if_any(self, name: str) -> list[Any] | None:
        """Return a further column of all images; None if the source has none."""
        try:
            return self.values(name)
        except InputError:
            return None

    def digest(self) -> str:
        """Return a digest of all that the decoded images and what is known about them depend on."""
        hashed = new_identity(str(VERSION).encode())
        for part in self.parts:
            about = [part.count, dict(part.key), asdict(part.decoding), part.classes, part.group_names]
            hashed.update(json.dumps(about, sort_keys=True, default=str).encode(errors="surrogateescape"))
            for file in part.files:
                hashed.update(file_line(file)[0])
            if part.groups is not None:
                hashed.update(part.groups.tobytes())
        hashed.update(b"" if self.labels is None else self.labels.tobytes())
        return hashed.hexdigest()

    def decode(self, rows: np.ndarray, *, size: int | None = None) -> np.ndarray:
        """Return the images at ascending, readable ``rows``, ``(n, channels, size, size)``, in another size if given.

        Raise an `InputError` if one cannot be read.
        """
        decoding = self.parts[0].decoding
        parts = [part.at(chosen) for part, chosen in self._split(rows) if len(chosen)]
        parts = [replace(part, decoding=replace(decoding, size=size or decoding.size)) for part in parts]
        blocks = list(replace(self, parts=parts).blocks(len(rows))) if parts else []
        for block in blocks:
            for row, reason in block.unreadable.items():
                raise InputError(f"{self.names(rows[row : row + 1])[0]} cannot be read any more ({reason})")
        return np.concatenate([block.images for block in blocks]) if blocks else np.empty((0, *self.shape))

    def blocks(self, size: int, *, start: int = 0) -> Iterator[Block]:
        """Yield the images from row ``start`` on, ``size`` at a time; threads decode some blocks ahead."""
        sources, decoding = self._sources(start), self.parts[0].decoding  # all parts have the same settings
        shape, dtype = self.shape, decoding.pixel_dtype
        num_bytes = size * int(np.prod(shape)) * np.dtype(dtype).itemsize
        ahead = min(max(_AHEAD_BYTES // num_bytes, 1), _AHEAD)
        waiting = deque[tuple[int, list[Future[list[np.ndarray | Exception]]]]]()
        with ThreadPoolExecutor(min(THREADS, available_cores()), thread_name_prefix="decode") as pool:
            try:
                while taken := list(islice(sources, size)):
                    pieces = [taken[first : first + BATCH] for first in range(0, len(taken), BATCH)]
                    waiting.append(
                        (start, [pool.submit(lambda taken: list(decoding.each(taken)), piece) for piece in pieces])
                    )
                    start += len(taken)
                    if len(waiting) > ahead:
                        yield _block(*waiting.popleft(), shape, dtype)
                while waiting:
                    yield _block(*waiting.popleft(), shape, dtype)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _sources(self, start: int) -> Iterator[Encoded]:
        for part, first in zip(self.parts, self._starts, strict=False):
            if start < first + part.count:
                yield from chain.from_iterable(part.batches(max(start - int(first), 0)))


def _block(
    start: int,
    tasks: Sequence[Future[list[np.ndarray | Exception]]],
    shape: tuple[int, int, int],
    dtype: str,
) -> Block:
    decoded = list(chain.from_iterable(task.result() for task in tasks))
    readable = [(row, image) for row, image in enumerate(decoded, start) if isinstance(image, np.ndarray)]
    unreadable = {
        row: unreadable_reason(image) for row, image in enumerate(decoded, start) if isinstance(image, Exception)
    }
    images = np.empty((len(readable), *shape), dtype)
    for number, (_, image) in enumerate(readable):
        images[number] = image
    return Block(start + len(decoded), np.array([row for row, _ in readable], dtype=np.int64), images, unreadable)


def list_images(
    path: str | Path,
    *,
    channels: int,
    size: int,
    pixels: Mapping[str, Any],
    settings: Mapping[str, Any],
    setting: str = "images",
) -> ImageList:
    """List the images of a file, a folder or a pattern; `InputError` if there are none.

    ``pixels`` are those of the encoder, ``settings`` some of `SETTINGS`, which take precedence. ``setting`` is the name
    of the path in messages.
    """
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown:
        raise InputError(f"dataset.{unknown[0]} has no effect here; allowed are dataset.{', dataset.'.join(SETTINGS)}")
    chosen = {**SETTINGS, **pixels, **settings}
    checked = {key: value for key, value in chosen.items() if key != "group" and (key, value) != ("folders", "auto")}
    check_arguments("dataset", **checked)
    decoding = Decoding(channels=channels, size=size, **{key: chosen.pop(key) for key in _OF_DECODING})
    folders = chosen.pop("folders")
    query = Query(
        **chosen, split="train", name="images", decoding=decoding, folders="none", split_folders=False, test_fraction=0
    )
    source = find(str(path), setting=setting)
    if "label" not in settings and source.kind == TABLES:
        label = as_written(source.files, "label")
        has_labels = any(label in schema_of(file).names for file in source.files)
        query = replace(query, label="label" if has_labels else None)  # without a warning
    parts, labels, classes = _indexed(source, query, folders)
    root = user_path(path)
    found = ImageList(root if root.is_dir() else Path(source.listing.root), parts, labels, classes)
    if "label" in settings and settings["label"] is not None and found.labels is None:
        raise InputError(f"dataset.label={settings['label']} but no image of {path} has a label; correct the name")
    decoding = decoding.with_found_dtype(chain.from_iterable(part.sample(np.arange(part.count)) for part in parts))
    warnings = source.warnings
    return replace(found, parts=[replace(p, decoding=decoding, warnings=warnings + p.warnings) for p in parts])


def _indexed(source: Source, query: Query, folders: str) -> tuple[list[ImageIndex], np.ndarray | None, tuple[str, ...]]:
    """Return the images of a source with their labels and classes."""
    splits = _SPLITS if source.kind == ARRAYS and len(source.files) == 1 else _SPLITS[:1]
    found = [index_source(source, replace(query, split=split)) for split in splits]
    # The images of the validation are also those of a missing test.
    parts = [*{part.image_name(0): part for part in found if part is not None and part.count}.values()]
    if not parts:
        raise InputError(f"{source.path} holds no images; give what holds your images")
    if source.kind == IMAGES:
        labels, classes = _folder_labels(source, query, folders, parts[0])
    else:
        labels = np.concatenate(
            [np.full(part.count, NO_LABEL) if part.labels is None else part.labels for part in parts]
        )
        classes = parts[0].classes
    return parts, None if labels is None or (labels == NO_LABEL).all() else labels, classes


def _folder_labels(
    source: Source, query: Query, folders: str, index: ImageIndex
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the classes of the folders of all images, also of those in the folders of splits."""
    if folders == "none" or query.label is None or not isinstance(index, SequenceIndex):
        return None, ()
    of_file, classes = dict[str, int](), tuple[str, ...]()
    for split in _SPLITS:
        labeled = replace(query, split=split, folders="class" if folders == "auto" else folders, split_folders="auto")
        try:
            found = list_split(source, labeled)
        except InputError:
            if folders != "auto" and split == "train":
                raise
            continue
        if found.files == index.images:  # no splits: nothing else to list
            return found.labels, found.classes
        if found.labels is not None:
            of_file |= dict(zip(map(str, found.files), found.labels.tolist(), strict=True))
            classes = found.classes
    if len(classes) == index.count > 1 and isinstance(index.images[0], Bands):
        return None, ()  # the folder of the bands of an image is no class
    labels = (of_file.get(str(_first_file(image)), NO_LABEL) for image in index.images)
    return np.fromiter(labels, dtype=np.int64, count=index.count), classes


def _first_file(image: Encoded) -> Encoded:
    """Return the file of an image, or that of its first band."""
    if isinstance(image, Bands):
        return image.files[0]
    return image.file if isinstance(image, Page) else image
