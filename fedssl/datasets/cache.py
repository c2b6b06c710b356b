"""Images of a data set, decoded or indexed once per host, and shared by all processes of the host.

The setting ``dataset.cache`` is the folder of all caches: ``auto`` is ``$XDG_CACHE_HOME/fedssl`` or
``~/.cache/fedssl``. Every data set has a subfolder, named after everything that the pixels depend on; see
`fedssl.datasets.storage`.
"""

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import torch

from fedssl.config.literal import user_path
from fedssl.datasets.base import ImageData, decoded
from fedssl.datasets.decoding import VERSION
from fedssl.datasets.formats import FORMAT_OF, OF_PILLOW_ALONE, installed_packages
from fedssl.datasets.image_index import ImageIndex, columns_at, file_line
from fedssl.datasets.images import ImageSource
from fedssl.datasets.listing import ending_of
from fedssl.datasets.sample_checks import range_warnings
from fedssl.datasets.storage import Storage
from fedssl.datasets.stores import Pixels, Records
from fedssl.digests import new_identity
from fedssl.locks import is_locked
from fedssl.logs import log, log_once
from fedssl.machine.memory import available_memory, gigabytes

MIN_SECONDS_TO_CACHE = 1.0  # estimated decoding time from which a file pays
_ENCODED = "-encoded"  # suffix of the folder of images that stay encoded
# Decoding time on one core, measured with images of 32 to 500 pixels: per image, and per encoded byte.
_SECONDS_PER_IMAGE, _SECONDS_PER_BYTE = 1e-4, 5e-8
_NAME = re.compile(rf"(.*-[0-9a-f]{{16}})({_ENCODED})?")  # of the folder of a cache
_MAX_DECODED = 4  # splits that stay decoded in memory
_AUTO_SHARE = 2  # storage=auto decodes into at most one part in two of the available memory, and of the free disk


def read_images(index: ImageIndex, *, cache: str | None, storage: str) -> ImageData:
    """Return the readable images of an index. Raise an `InputError` if the disk or the memory is too small.

    ``cache`` is the folder of all caches, or "auto"; None uses the memory of this process, as for small data sets. The
    ``storage`` "auto" decodes if decoded images exist, or if `has_room`.
    """
    source, stored = _read(index, cache=cache, storage=storage)
    readable = stored.readable
    warnings = index.warnings + index.unreadable_warnings(stored.unreadable)
    warnings += range_warnings(index.sample(readable), index.decoding)
    if isinstance(stored, Records) and (packed := sum(str(file).lower().endswith(".nii.gz") for file in index.files)):
        warnings += (
            f"{packed:,} files of .nii.gz are decompressed again for every slice; set dataset.storage=decoded, or "
            "unpack them with gunzip",
        )
    found = {name: column for name, column in columns_at(index, readable).items() if column is not None}
    return ImageData(
        source,
        **{"labels": None, **{name: torch.from_numpy(column) for name, column in found.items()}},
        classes=index.classes,
        owner_names=index.owner_names,
        warnings=warnings,
        failed_files=stored.failed_files,
        origin=(index, readable),
        folder=stored.folder,
    )


def _read(index: ImageIndex, *, cache: str | None, storage: str) -> tuple[ImageSource, Storage]:
    name, seconds = _identity(index)
    if cache is not None and seconds >= MIN_SECONDS_TO_CACHE:
        folder = cache_folder(cache)
        if folder is not None:
            return _open_or_make(index, folder / name, storage=storage, required=cache != "auto")
        log_once(logging.WARNING, "this user has no home folder: every process decodes the images; set dataset.cache")
    key, before = (name, storage), decoded.pop(index.name, None)
    if before is None or before[0] != key or before[2].failed:
        before = None  # its memory is free before others are decoded
        before = key, *_open_or_make(index, None, storage=storage, required=False)
    decoded[index.name] = before
    for oldest in [*decoded][:-_MAX_DECODED]:
        del decoded[oldest]
    return before[1:]


def _open_or_make(
    index: ImageIndex, folder: Path | None, *, storage: str, required: bool
) -> tuple[ImageSource, Storage]:
    """Return the images in a folder or, without one, in memory, after decoding them if necessary."""
    stored: Storage = Pixels(index, folder)
    source = None if storage == "encoded" else stored.read()
    if source is not None:
        return source, stored
    index = replace(index, decoding=index.decoding.with_found_dtype(index.sample(np.arange(index.count))))
    if storage == "encoded" or (storage == "auto" and not has_room(index.num_pixel_bytes, folder)):
        stored = Records(index, None if folder is None else folder.with_name(f"{folder.name}{_ENCODED}"))
        source = stored.read()
    else:
        stored = Pixels(index, folder)
    return stored.make(required=required) if source is None else source, stored


def has_room(needed: int, folder: Path | None) -> bool:
    """Return whether ``needed`` bytes are at most half of the available memory, and of the free disk if in a file.

    Images that stay encoded are decoded again in every epoch, which takes longer than to read them from memory.
    """
    room = {"available memory": available_memory()}
    if folder is not None:
        existing = next(parent for parent in folder.parents if parent.exists())
        room["free disk space"] = shutil.disk_usage(existing).free
    for what, free in room.items():
        if free is not None and _AUTO_SHARE * needed > free:
            log.info(
                "dataset.storage=auto: the images stay encoded, because decoded they need %s, more than half of the %s "
                "(%s)",
                *(gigabytes(needed), what, gigabytes(free)),
            )
            return False
    return True


def cache_folder(location: str | None) -> Path | None:
    """Return the folder that ``dataset.cache`` names; None for no cache, and for "auto" without a home folder."""
    if location != "auto":
        return None if location is None else user_path(location)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or user_path("~/.cache")) / "fedssl"
    except RuntimeError:
        return None


def _identity(index: ImageIndex) -> tuple[str, float]:
    """Return a name of the images, with a digest of all that the pixels depend on, and the seconds to decode them."""
    settings = {"version": VERSION, "Pillow": PIL.__version__, **index.key, **vars(index.decoding)}
    if not {FORMAT_OF.get(ending_of(str(file))) for file in index.files} <= OF_PILLOW_ALONE:
        settings["packages"] = installed_packages()  # without which some images are unreadable
    hashed = new_identity(json.dumps(settings, sort_keys=True).encode())
    num_bytes = 0
    for file in index.files:
        line, size = file_line(file)
        hashed.update(line)
        num_bytes += size
    seconds = index.count * (_SECONDS_PER_IMAGE + _SECONDS_PER_BYTE * num_bytes / index.num_in_files)
    name = re.sub(r"[^-.0-9A-Za-z]+", "-", index.name)
    return f"{name}-{hashed.hexdigest()[:16]}", seconds


def delete_other_caches(folder: Path) -> None:
    """Delete the caches of other images beside this one, except those in which a process decodes; links are kept."""
    for other in folder.parent.iterdir():
        found = _NAME.fullmatch(other.name)
        if found and not folder.name.startswith(found[1]) and not other.is_symlink() and not _is_in_use(other):
            log.info("%s is deleted, since its images are not used", other)
            shutil.rmtree(other, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    try:
        with (folder / "lock").open("rb") as stream:
            return is_locked(stream.fileno())
    except OSError:  # there is no lock
        return False
