"""Files with several images: the pages of TIFF, the frames of DICOM, the slices of volumes.

The setting ``dataset.pages``:

============  =========================================================================
``auto``      all of formats of volumes and videos (`VOLUMES`), the first of other files
``first``     the first of each file
``all``       all, each an image
``channels``  all; as many successive ones as ``dataset.channels`` are one image
============  =========================================================================

With ``channels`` and a single page in each file, the files of a folder are the bands of one image, in the order of
their names: ``scene/B02.tif``, ``scene/B03.tif``. They may have different resolutions.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedssl.datasets.decoding import THREADS, Bands, Decoding, Encoded, Page, unreadable_reason
from fedssl.datasets.formats import FORMAT_OF, FROM_START, SEVERAL, VOLUMES, is_zarr
from fedssl.datasets.image_index import ImageIndex, SequenceIndex
from fedssl.datasets.listing import ending_of
from fedssl.datasets.pages import open_pages
from fedssl.datasets.sample_checks import SAMPLE
from fedssl.digests import identity
from fedssl.errors import InputError, sanitize, shortened
from fedssl.logs import log_once
from fedssl.machine.process import available_cores
from fedssl.safe_io import FilePath


@dataclass(frozen=True, kw_only=True)
class PageIndex(SequenceIndex):
    """Images that are pages of files, or several files."""

    images: Sequence[Page | Bands]
    source: SequenceIndex  # the files, with further values of each
    numbers: np.ndarray  # of the file of each image in ``source``

    def at(self, rows: np.ndarray) -> Self:
        """Return the index of the images at ``rows``."""
        images = [self.images[row] for row in rows]
        key = {**self.key, "pages": identity(repr([tuple(map(str, image)) for image in images]).encode())}
        of_images = (image.files if isinstance(image, Bands) else (image.file,) for image in images)
        files = list(dict.fromkeys(chain.from_iterable(of_images)))
        changed: dict[str, Any] = {"images": images, "files": files, "num_in_files": len(rows), "key": key}
        return replace(ImageIndex.at(self, rows), numbers=self.numbers[rows], **changed)

    def values(self, name: str) -> Sequence[Any]:
        found = self.source.values(name)
        return [found[number] for number in self.numbers]

    def batches(self, start: int) -> Iterator[Sequence[Encoded]]:
        """Yield the images from index ``start`` on, those of a file together if it is decoded from its start."""
        if self._from_start:
            return (list(pages) for _, pages in groupby(self.images[start:], attrgetter("file")))
        return super().batches(start)

    def sample(self, readable: np.ndarray) -> Iterable[Encoded]:
        if self._from_start:  # pages of one file have the same dtype
            return [next(pages) for _, pages in groupby(self.images, attrgetter("file"))][:SAMPLE]
        return super().sample(readable)

    @property
    def _from_start(self) -> bool:
        return any(ending_of(str(file)) in FROM_START for file in self.files)


def with_pages(index: SequenceIndex, files: Sequence[FilePath], pages: str) -> SequenceIndex:
    """Return the index of the pages of ``files``, which are the images of ``index``; unchanged if each has one."""
    decoding = index.decoding
    depth = decoding.channels if pages == "channels" else 1
    uncounted = list[str]()
    counts = [1] * len(files)
    several = [place for place, file in enumerate(files) if _has_several(file, pages)]
    with ThreadPoolExecutor(min(THREADS, available_cores())) as pool:  # not of all files, which may be millions
        for place, count in zip(
            several, pool.map(lambda place: _count(files[place], decoding, uncounted), several), strict=True
        ):
            counts[place] = count
    if uncounted:
        line = f"the pages of {len(uncounted)} files cannot be counted, and only the first is used: "
        index = replace(index, warnings=(*index.warnings, sanitize(line + shortened(sorted(uncounted)))))
    if max(counts, default=1) == 1 and not uncounted:
        return index if depth == 1 else _with_bands(index, files)
    images = [
        Page(file, number, depth)
        for file, count in zip(files, counts, strict=True)
        for number in range(0, max(count, 1), depth)
    ]
    numbers = np.repeat(np.arange(len(files)), [-(-max(count, 1) // depth) for count in counts])
    expanded = _fields(index, numbers) | {"images": images}
    if index.groups is None:  # the pages of a file are alike
        expanded |= {"groups": numbers, "group_names": tuple(map(str, files))}
    return PageIndex(**expanded).at(np.arange(len(images)))


def _fields(index: SequenceIndex, numbers: np.ndarray) -> dict[str, Any]:
    """Return the fields of the index of images of the files with these ``numbers``."""
    at = ImageIndex.at(index, numbers)
    return {field.name: getattr(at, field.name) for field in fields(ImageIndex)} | {"source": index, "numbers": numbers}


def _with_bands(index: SequenceIndex, files: Sequence[FilePath]) -> SequenceIndex:
    """Return the index of the folders of ``files``, whose files are the bands of one image each."""
    depth, rows, images, expected = index.decoding.channels, list[int](), list[Bands](), None
    for folder, group in groupby(enumerate(files), lambda numbered: Path(numbered[1]).parent):
        numbers, paths = zip(*group, strict=True)
        names = [Path(path).name for path in paths]
        bands = [name.removeprefix(os.path.commonprefix(names)) for name in names]  # noqa: RUF071, of names
        if len(paths) != depth or bands != (expected or bands):
            raise InputError(
                f"dataset.pages=channels: every file has one page, and {folder} has {shortened(names)} in place of "
                f"{f'bands such as {shortened(expected)}' if expected else f'dataset.channels={depth} bands'}; "
                "give each image a folder with its bands alone, or set dataset.pages=first"
            )
        expected = bands
        rows.append(numbers[0])
        images.append(Bands(paths))
    if len(index.classes) == len(rows) > 1:
        raise InputError(
            "dataset.pages=channels: each image would be a class of its own, because the folder of its bands has no "
            "other images; set dataset.folders=none, or move the folders of a class into one folder"
        )
    log_once(logging.INFO, f"the files of a folder are the channels of an image, such as {images[0].files}")
    return PageIndex(**_fields(index, np.array(rows)) | {"images": images}).at(np.arange(len(images)))


def _has_several(file: FilePath, pages: str) -> bool:
    """Return whether several pages of a file may be used, by its name."""
    other = "ZARR" if is_zarr(file) else "DICOM"  # whose names may have any ending
    form = FORMAT_OF.get(ending_of(str(file).rpartition("/")[2]), other)
    return pages != "first" and form in (VOLUMES if pages == "auto" else SEVERAL)


def _count(file: FilePath, decoding: Decoding, uncounted: list[str]) -> int:
    """Return the number of pages; 1 of a file that cannot be opened, or is added to ``uncounted``."""
    try:
        count = _cached_count(
            str(file), Path(file).stat().st_mtime_ns, decoding.max_pixels, decoding.channels, decoding.video_interval
        )
    except Exception:  # a damaged file can raise any exception; it is reported when it is decoded
        return 1
    if isinstance(count, str):
        uncounted.append(f"{file} ({count})")
        return 1
    return count


@lru_cache(maxsize=2**17)  # every split lists its files
def _cached_count(file: str, modified: int, max_pixels: int, channels: int, interval: float) -> int | str:
    """Return the number of pages; the reason if those of a file that can be opened cannot be counted."""
    with open_pages(file, max_pixels=max_pixels, channels=channels, video_interval=interval) as opened:
        try:
            return opened.count
        except Exception as error:  # as above
            return unreadable_reason(error)
