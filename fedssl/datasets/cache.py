"""Images of a data set in files: decoded or indexed once per host, and shared by all processes of the host.

The setting ``dataset.cache`` is the folder of all caches: ``auto`` is ``$XDG_CACHE_HOME/fedssl`` or
``~/.cache/fedssl``. Every data set has a subfolder, named after everything that the pixels depend on:

=============  ============================================================================
``lock``       held by the process that decodes; the kernel releases it when the process ends
``note.json``  the progress of decoding, from which the next process continues
``about.npz``  what is in the files, with their stamps, and unreadable images; without it the cache is empty
=============  ============================================================================

and the files of `fedssl.datasets.pixel_file` or `fedssl.datasets.pack`. Only damaged files are removed. A folder may be
deleted whenever no run uses it.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import PIL

from fedssl.config.literal import user_path
from fedssl.datasets.buffers import EncodedInput, memory_buffer, record_buffer
from fedssl.datasets.cache_entry import CacheEntry, cache_error
from fedssl.datasets.decode_buffer import DecodeBuffer
from fedssl.datasets.decoding import VERSION, Shape
from fedssl.datasets.pack import IndexEntry
from fedssl.datasets.pixel_file import PixelEntry
from fedssl.digests import new_identity
from fedssl.machine.memory import available_memory, gigabytes

MIN_SECONDS_TO_CACHE = 1.0  # estimated decoding time from which a file pays
# Decoding time on one core, measured with images of 32 to 500 pixels: per image, and per encoded byte.
_SECONDS_PER_IMAGE, _SECONDS_PER_BYTE = 1e-4, 5e-8
_AUTO_SHARE = 2  # storage=auto decodes into at most one part in two of the available memory, and of the free disk

log = logging.getLogger("fedssl")


@dataclass(frozen=True)
class CacheKey:
    """Everything that the pixels of a data set depend on."""

    name: str  # readable part of the folder's name
    files: Sequence[Path]  # files with the encoded images
    num_images: int  # number of images in the files
    settings: Mapping[str, Any]  # all other settings, as JSON values


@contextmanager
def open_buffer(
    location: str | None, cache_key: CacheKey, shape: Shape, *, storage: str, encoded: Callable[[], EncodedInput]
) -> Iterator[DecodeBuffer]:
    """Open the buffer of a data set's images; decode into it unless it is ``complete``.

    The images are stored, and ``source`` is made, when the block ends without an exception. Raise an `InputError` if
    the disk or the memory is too small.

    Parameters
    ----------
    location : str or None
        The folder of all caches, or "auto". None uses the memory of this process, as for small data sets.
    shape : tuple
        ``(images to decode, channels, size, size)``.
    storage : {"decoded", "encoded", "auto"}
        "auto" decodes if decoded images exist, or if `has_room`.
    encoded : callable
        Returns where the encoded images are; called if they stay encoded.
    """
    folder = None if location is None else _folder(location, cache_key, num_images=shape[0])
    entry: CacheEntry | None = None if folder is None else PixelEntry(folder)
    stored = entry.read() if entry is not None and storage != "encoded" else None
    if stored is None and (storage == "encoded" or (storage == "auto" and not has_room(shape, folder))):
        images = encoded()
        entry = None if folder is None else IndexEntry(folder.with_name(f"{folder.name}-encoded"), images)
        stored = None if entry is None else entry.read()
        in_memory: Callable[[], DecodeBuffer] = partial(record_buffer, shape, images)
    else:
        in_memory = partial(memory_buffer, shape)
    if stored is not None:
        yield stored
        return
    lock = None if entry is None else _open_lock(entry, required=location != "auto")
    if entry is None or lock is None:
        buffer = in_memory()
        yield buffer
        buffer.finish()
        return
    with lock:
        entry.wait_for(lock)
        stored = entry.read()  # another process may have decoded the images meanwhile
        buffer = stored or entry.new_buffer(shape)
        yield buffer
        if stored is None:
            entry.store(buffer)


def has_room(shape: Shape, folder: Path | None) -> bool:
    """Return whether decoded images need at most half of the available memory, and of the free disk if in a file.

    Images that stay encoded are decoded again in every epoch, which takes longer than to read them from memory.
    """
    needed = math.prod(shape)
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


def cache_folder(location: str) -> Path:
    """Return the folder that ``dataset.cache`` names."""
    if location != "auto":
        return user_path(location)
    return Path(os.environ.get("XDG_CACHE_HOME") or user_path("~/.cache")) / "fedssl"


def _folder(location: str, cache_key: CacheKey, *, num_images: int) -> Path | None:
    """Return the folder of these images; None if decoding them takes less than `MIN_SECONDS_TO_CACHE`."""
    num_bytes, digest = _digest(cache_key)
    seconds = num_images * (_SECONDS_PER_IMAGE + _SECONDS_PER_BYTE * num_bytes / cache_key.num_images)
    if seconds < MIN_SECONDS_TO_CACHE:
        return None
    return cache_folder(location) / f"{re.sub(r'[^-.0-9A-Za-z]+', '-', cache_key.name)}-{digest}"


def _digest(cache_key: CacheKey) -> tuple[int, str]:
    """Return the size of all files in bytes, and a digest of everything that the pixels depend on."""
    settings = {"version": VERSION, "Pillow": PIL.__version__, **cache_key.settings}
    hashed = new_identity(json.dumps(settings, sort_keys=True).encode())
    num_bytes = 0
    for file in cache_key.files:
        status = file.stat()
        hashed.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
        num_bytes += status.st_size
    return num_bytes, hashed.hexdigest()[:16]


def _open_lock(entry: CacheEntry, *, required: bool) -> IO[str] | None:
    """Make the folder and open its lock file; None if the folder is not ``required`` and cannot be made."""
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        return (entry.folder / "lock").open("w")
    except OSError as error:
        if required:
            raise cache_error(entry.folder, error) from error
        log.warning("%s cannot be made (%s): images are decoded into memory", entry.folder, error.strerror)
        return None
