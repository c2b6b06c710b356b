"""Decoded pictures in a file: made once on a host, and read by all its processes as one piece of memory.

The setting ``dataset.cache`` is the folder of all of them: ``auto`` is ``$XDG_CACHE_HOME/fedssl`` or
``~/.cache/fedssl``. Each is a folder of its own, named after what the pixels depend on:

=============  ====================================================================================
``lock``       held by the process that decodes, which the kernel lets go of when the process ends
``partial``    the pixels, while they are decoded
``note.json``  how far that is: who is next goes on from there
``pixels``     the pixels, when all are there
``about.npz``  labels, owners and names, and what ``pixels`` must look like; without it nothing counts
=============  ====================================================================================

Nothing is removed but what is damaged: a folder may be deleted at any time when no run reads it.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import PIL
import torch

from fedssl.datasets.base import Pictures
from fedssl.datasets.decoding import NOTED, VERSION, Canvas, in_memory
from fedssl.errors import InputError
from fedssl.files import mapped, write_text, write_whole
from fedssl.machine.memory import gigabytes

WORTH = 1.0  # seconds of decoding from which on a file pays
# Of decoding on one core, measured with pictures of 32 to 500 pixels: what each costs, and each of its encoded bytes.
_SECONDS_PER_PICTURE, _SECONDS_PER_BYTE = 1e-4, 5e-8
_PATIENCE = 0.2  # seconds between two looks at the lock

NewCanvas = Callable[[tuple[int, int, int, int]], Canvas]

log = logging.getLogger("fedssl")


@dataclass(frozen=True)
class Origin:
    """Where pictures come from: all that their pixels, labels and owners depend on.

    Attributes
    ----------
    name : str
        For people.
    files : sequence of Path
        With what is to be decoded.
    pictures, wanted : int
        How many the files hold, and how many of these are to be decoded.
    settings : mapping
        Everything else, ready for JSON.
    """

    name: str
    files: Sequence[Path]
    pictures: int
    wanted: int
    settings: Mapping[str, Any]


def cached(place: str | None, origin: Origin, make: Callable[[NewCanvas], Pictures | None]) -> Pictures | None:
    """The pictures, decoded once on this host or in this process.

    Parameters
    ----------
    place : str or None
        The folder, or "auto"; None: they are decoded into the memory of this process, as few ones always are.
    origin : Origin
    make : callable
        Decodes them onto a canvas that it asks for, or finds that there are none.

    Raises
    ------
    InputError
        There is no room for the file, or the folder cannot be used; and what ``make`` raises.
    """
    if place is None:
        return make(in_memory)
    size, key = _identity(origin)
    if origin.wanted * (_SECONDS_PER_PICTURE + _SECONDS_PER_BYTE * size / origin.pictures) < WORTH:
        return make(in_memory)
    entry = Entry(_root(place) / f"{re.sub(r'[^-.0-9A-Za-z]+', '-', origin.name)}-{key}")
    found = entry.read()
    if found is not None:
        return found
    try:
        lock = entry.open()
    except OSError as error:
        if place != "auto":
            raise _unusable(entry.folder, error) from error
        log.warning("%s cannot be made (%s): pictures are decoded into memory", entry.folder, error.strerror)
        return make(in_memory)
    with lock:
        entry.wait_for(lock)
        return entry.read() or entry.write(make)


def _root(place: str) -> Path:
    """The folder that a setting names."""
    if place != "auto":
        return Path(place).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "fedssl"


def _identity(origin: Origin) -> tuple[int, str]:
    """Bytes of all files, and a name for the pictures: another one for each change of what they depend on."""
    settings = {"version": VERSION, "Pillow": PIL.__version__, **origin.settings}
    hashed = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    total = 0
    for file in origin.files:
        found = file.stat()
        hashed.update(f"{file}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
        total += found.st_size
    return total, hashed.hexdigest()[:16]


class Entry:
    """The folder of one piece of decoded pictures; see the module for what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about, self._pixels = folder / "about.npz", folder / "pixels"
        self._partial, self._note = folder / "partial", folder / "note.json"

    def read(self) -> Pictures | None:
        """The pictures, mapped; None if they are not there, or not as they were written."""
        try:
            with np.load(self._about, allow_pickle=False) as about:
                columns = dict(about)  # the archive has a checksum of each
            if columns["stamp"].tolist() != _stamp(self._pixels):
                raise ValueError("its pixels have been changed")
            images = mapped(self._pixels).view(*columns["shape"].tolist())
        except FileNotFoundError:
            return None
        except Exception as error:  # there is no end to how reading a damaged file can fail
            log.warning("%s is damaged (%s): its pictures are decoded again", self.folder, error)
            return None
        labels, owners = (torch.from_numpy(columns[name]) if name in columns else None for name in ("labels", "owners"))
        classes, owner_names, notices = (
            tuple(columns[name].tolist()) for name in ("classes", "owner_names", "notices")
        )
        return Pictures(images, labels, classes, owners, owner_names, notices)

    def open(self) -> IO[str]:
        """Make the folder and open its lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return (self.folder / "lock").open("w")

    def wait_for(self, lock: IO[str]) -> None:
        """Take the lock, which another process may have until it has decoded the pictures or has died."""
        told = -math.inf
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() - told > NOTED:
                    told = time.monotonic()
                    done = f"{self._noted()[0]:,}"
                    log.info(
                        "another process decodes the pictures of %s (%s so far); waiting for it", self.folder, done
                    )
                time.sleep(_PATIENCE)
            except OSError as error:  # a file system without locks
                raise _unusable(self.folder, error) from error

    def write(self, make: Callable[[NewCanvas], Pictures | None]) -> Pictures | None:
        """Decode what is left to decode, and put the pictures in place; only with the lock."""
        for old in (self._about, self._pixels):
            old.unlink(missing_ok=True)
        pictures = make(self._canvas)
        if pictures is None:
            return None
        with _writing(self.folder):
            with self._partial.open("r+b") as stream:
                stream.truncate(pictures.images.nbytes)  # without the place of those that could not be read
                os.fsync(stream)
            self._partial.replace(self._pixels)
            write_whole(self._about, lambda partial: self._write_about(partial, pictures))
            self._note.unlink(missing_ok=True)
        written = self.read()
        assert written is not None
        return written

    def _write_about(self, file: Path, pictures: Pictures) -> None:
        arrays: dict[str, Any] = {
            "shape": np.array(pictures.images.shape),
            "stamp": np.array(_stamp(self._pixels)),
            "classes": np.array(pictures.classes, dtype=np.str_),
            "owner_names": np.array(pictures.owner_names, dtype=np.str_),
            "notices": np.array(pictures.notices, dtype=np.str_),
        }
        known = {"labels": pictures.labels, "owners": pictures.owners}
        arrays |= {name: column.numpy() for name, column in known.items() if column is not None}
        with file.open("wb") as stream:  # by its name NumPy would give it another one
            np.savez(stream, **arrays)
            stream.flush()
            os.fsync(stream)

    def _canvas(self, shape: tuple[int, int, int, int]) -> Canvas:
        """The pixels so far, with room for all of them."""
        needed = math.prod(shape)
        with _writing(self.folder):
            if not self._partial.is_file() or self._partial.stat().st_size != needed:
                self._note.unlink(missing_ok=True)
                self._partial.unlink(missing_ok=True)
                _reserve(self._partial, needed)
            pixels = np.memmap(self._partial, dtype=np.uint8, mode="r+", shape=shape)
        done, unreadable = self._noted()
        log.info("decoding %s pictures into %s (%s)", f"{shape[0] - done:,}", self.folder, gigabytes(needed))
        return _MappedCanvas(pixels, self._note, done=done, unreadable=unreadable)

    def _noted(self) -> tuple[int, dict[int, str]]:
        """How far decoding has come; not at all where nothing readable says so."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return int(note["done"]), {int(at): str(reason) for at, reason in note["unreadable"].items()}
        except Exception:  # there is no end to how reading a damaged file can fail
            return 0, {}


class _MappedCanvas(Canvas):
    """A canvas that is a file, with a note beside it of how far it is decoded."""

    def __init__(self, pixels: np.memmap, note: Path, *, done: int, unreadable: dict[int, str]) -> None:
        super().__init__(pixels)
        self.done, self.unreadable = done, unreadable
        self._file, self._note = pixels, note

    def note(self, done: int, unreadable: Mapping[int, str]) -> None:
        super().note(done, unreadable)
        with _writing(self._note.parent):
            self._file.flush()  # first: what the note says must be on the disk, whatever happens to the machine
            write_text(self._note, json.dumps({"done": self.done, "unreadable": self.unreadable}))


def _stamp(file: Path) -> list[int]:
    """Size and time of the last change: who writes into the file changes them."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _reserve(file: Path, size: int) -> None:
    """Make a file of this size whose place on the disk is sure."""
    free = shutil.disk_usage(file.parent).free
    try:
        with file.open("wb") as stream:
            if sys.platform == "linux":
                os.posix_fallocate(stream.fileno(), 0, size)
            else:
                stream.truncate(size)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise InputError(
            f"{file.parent} has no room for the decoded pictures ({error.strerror}): they need {gigabytes(size)}, and "
            f"{gigabytes(free)} are free; name another folder with dataset.cache=FOLDER, or decode into memory with "
            "dataset.cache=null"
        ) from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in one sentence what keeps the files of the folder from being written."""
    try:
        yield
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"{folder} cannot be written ({error.strerror or error}); name another folder with dataset.cache=FOLDER, or "
        "decode into memory with dataset.cache=null"
    )
