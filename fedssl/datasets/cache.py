"""Decoded images in a file: made once on a host, and read by all its processes as one piece of memory.

The setting ``dataset.cache`` is the folder of all of them: ``auto`` is ``$XDG_CACHE_HOME/fedssl`` or
``~/.cache/fedssl``. Each is a folder of its own, named after what the pixels depend on; `fedssl.datasets.cache_entry`
says what is in it. Nothing is removed but what is damaged: a folder may be deleted whenever no run uses it.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL

from fedssl.datasets.base import ImageData
from fedssl.datasets.cache_entry import CacheEntry, NewBuffer, cache_error
from fedssl.datasets.decoding import VERSION, memory_buffer

MIN_SECONDS_TO_CACHE = 1.0  # seconds of decoding from which on a file pays
# Of decoding on one core, measured with images of 32 to 500 pixels: what each costs, and each of its encoded bytes.
_SECONDS_PER_IMAGE, _SECONDS_PER_BYTE = 1e-4, 5e-8

log = logging.getLogger("fedssl")


@dataclass(frozen=True)
class CacheKey:
    """Where images come from: all that their pixels, labels and owners depend on.

    Attributes
    ----------
    name : str
        For people.
    files : sequence of Path
        With what is to be decoded.
    num_images, wanted : int
        How many the files hold, and how many of these are to be decoded.
    settings : mapping
        Everything else, ready for JSON.
    """

    name: str
    files: Sequence[Path]
    num_images: int
    wanted: int
    settings: Mapping[str, Any]


def cached(place: str | None, cache_key: CacheKey, make: Callable[[NewBuffer], ImageData | None]) -> ImageData | None:
    """The images, decoded once on this host or in this process.

    Parameters
    ----------
    place : str or None
        The folder, or "auto"; None: they are decoded into the memory of this process, as few ones always are.
    cache_key : CacheKey
    make : callable
        Decodes them onto a buffer that it asks for, or finds that there are none.

    Raises
    ------
    InputError
        There is no room for the file, or the folder cannot be used; and what ``make`` raises.
    """
    if place is None:
        return make(memory_buffer)
    size, key = _identity(cache_key)
    if cache_key.wanted * (_SECONDS_PER_IMAGE + _SECONDS_PER_BYTE * size / cache_key.num_images) < MIN_SECONDS_TO_CACHE:
        return make(memory_buffer)
    entry = CacheEntry(root(place) / f"{re.sub(r'[^-.0-9A-Za-z]+', '-', cache_key.name)}-{key}")
    found = entry.read()
    if found is not None:
        return found
    try:
        lock = entry.open()
    except OSError as error:
        if place != "auto":
            raise cache_error(entry.folder, error) from error
        log.warning("%s cannot be made (%s): images are decoded into memory", entry.folder, error.strerror)
        return make(memory_buffer)
    with lock:
        entry.wait_for(lock)
        return entry.read() or entry.write(make)


def root(place: str) -> Path:
    """The folder that a setting names."""
    if place != "auto":
        return Path(place).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "fedssl"


def _identity(cache_key: CacheKey) -> tuple[int, str]:
    """Bytes of all files, and a name for the images: another one for each change of what they depend on."""
    settings = {"version": VERSION, "Pillow": PIL.__version__, **cache_key.settings}
    hashed = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    total = 0
    for file in cache_key.files:
        found = file.stat()
        hashed.update(f"{file}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
        total += found.st_size
    return total, hashed.hexdigest()[:16]
