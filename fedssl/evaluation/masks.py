"""Masks of images: the class of every pixel, in image files, columns of parquet files, or arrays of NPZ files.

A mask has the size of its image, and the same centered square of both is used. Masks are scaled to nearest pixels.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from fedssl.config.literal import user_path
from fedssl.datasets.decoding import Decoding, Encoded, open_source, unreadable_reason
from fedssl.datasets.geometry import center_square
from fedssl.datasets.raster import Raster
from fedssl.errors import InputError, shortened
from fedssl.evaluation.protocol import LabeledImages
from fedssl.safe_io import sanitize

_MODES = ("1", "L", "P", "I", "I;16")  # of one number per pixel
_MAX_CLASS = 255
_TRANSPOSED = 5  # the first EXIF orientation that exchanges width and height


def read_masks(images: LabeledImages, where: str) -> Tensor:
    """Return the classes of the pixels of images, uint8 ``(n, size, size)``.

    ``where`` is a folder with a mask for every image file, of the same name except for its ending, in the same
    subfolders, if any. Otherwise it is a column of the data set.
    """
    if images.origin is None:
        raise InputError(f"evaluation.masks={where} but the data set has no files; use dataset.path=FOLDER")
    index, rows = images.origin
    decoding, folder = index.decoding, user_path(where)
    if folder.is_dir():
        sources: Sequence[Any] = _mask_files(folder, [index.image_name(row) for row in rows])
    else:
        values = index.values(where)
        sources = [values[row] for row in rows]
    masks = np.empty((len(rows), decoding.size, decoding.size), np.uint8)
    chosen = {int(row): place for place, row in enumerate(rows)}
    for row, image in enumerate(chain.from_iterable(index.batches(0))):
        if row not in chosen:
            continue
        try:
            mask = _open_mask(sources[chosen[row]], decoding)
            size = _displayed_size(image, decoding)
        except Exception as error:  # a decoder can raise any exception
            reason = unreadable_reason(error)
            raise InputError(sanitize(f"the mask of {index.image_name(row)} cannot be used: {reason}")) from error
        if mask.size != size:
            raise InputError(
                sanitize(
                    f"the mask of {index.image_name(row)} has {mask.width} x {mask.height} pixels, but the image has "
                    f"{size[0]} x {size[1]}; save masks in the size of their images"
                )
            )
        left, top, side = center_square(*size)
        box, side_out = (left, top, left + side, top + side), (decoding.size, decoding.size)
        masks[chosen[row]] = np.asarray(mask.resize(side_out, Image.Resampling.NEAREST, box=box))
    return torch.from_numpy(masks)


def check_separate(train: LabeledImages, test: LabeledImages, where: str) -> None:
    """Raise an `InputError` if a folder without subfolders gives training and test images the same masks."""
    folder = user_path(where)
    if folder.is_dir() and train.origin is not None and test.origin is not None:
        images = [{index.image_name(row) for row in rows} for index, rows in (train.origin, test.origin)]
        files = [{*_mask_files(folder, sorted(names))} for names in images]
        if files[0] & files[1] and not images[0] & images[1]:
            raise InputError(f"{folder}: training and test images have the same masks; use subfolders as theirs")


def _mask_files(folder: Path, images: Sequence[str]) -> list[Path]:
    """Return the mask of each image: that with the longest common end of its path."""
    masks = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.*"))}
    found, missing = list[Path](), list[Path]()
    for image in images:
        parts = PurePath(image).with_suffix("").parts
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        mask = next((masks[end] for end in ends if end in masks), None)
        (missing if mask is None else found).append(mask or Path(image))
    if missing:
        raise InputError(
            sanitize(
                f"{folder} has no mask for {len(missing)} of {len(images)} images ({shortened(map(str, missing))}); "
                "give each mask the name of its image, except for the ending"
            )
        )
    repeated = [str(mask) for mask, number in Counter(found).items() if number > 1]
    if repeated:
        raise InputError(sanitize(f"several images have the masks {shortened(repeated)}; use subfolders as theirs"))
    return found


def _open_mask(source: Any, decoding: Decoding) -> Image.Image:
    """Return a mask as gray image of 8 bits, whose values are classes."""
    if isinstance(source, np.ndarray):
        values = source.squeeze()
    else:
        content: Encoded | None = source.get("bytes") if isinstance(source, dict) else source
        if not isinstance(content, bytes | Path):
            raise InputError("it has no bytes of an image")
        with open_source(content, decoding) as (_, page):
            if isinstance(page, Raster):
                values = page.load()
            elif page.mode not in _MODES:
                raise InputError(f"it has mode {page.mode}, but pixels are class numbers; save gray values")
            else:
                values = np.asarray(page)
    if values.ndim != 2 or values.dtype.kind not in "uib" or values.min() < 0 or values.max() > _MAX_CLASS:
        found = f"shape {values.shape}, type {values.dtype} and values from {values.min()} to {values.max()}"
        raise InputError(f"it has {found}, but a mask has one class from 0 to {_MAX_CLASS} for each pixel")
    return Image.fromarray(values.astype(np.uint8))


def _displayed_size(source: Encoded, decoding: Decoding) -> tuple[int, int]:
    """Return width and height of an image that is turned upright."""
    with open_source(source, decoding) as (_, page):
        if isinstance(page, Raster):
            return page.shape[1], page.shape[0]
        turned = page.getexif().get(ExifTags.Base.Orientation, 1) >= _TRANSPOSED
        return (page.height, page.width) if turned else page.size
