"""Files that are written whole or not at all, one for each round, and the folder of a new run.

What is written whole takes the place of what is there at once, and a crash leaves that as it was.
"""

import errno
import mmap
import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch

from fedssl.errors import InputError
from fedssl.untrusted import MAX_TENSORS_BYTES, open_regular_file

_PARTIAL = ".partial"  # end of the names of files that are being written


def atomic_write(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` make a file under a temporary name beside ``file``, then put it in the place of ``file``.

    Both are on the disk when this returns: neither a crash nor a loss of power leaves a part of it.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}{_PARTIAL}")
    try:
        partial.unlink(missing_ok=True)  # it may be a link of somebody else's
        with partial.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
        _sync_folder(file.parent)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides what the disk says
            raise error.__context__ from None
        raise
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file, UTF-8."""
    atomic_write(file, lambda stream: stream.write(text.encode()))


def append_text(file: Path, text: str) -> None:
    """Write at the end of a text file, UTF-8; `fsync_file` sees to it that it is on the disk."""
    with file.open("ab") as stream:
        stream.write(text.encode())


def fsync_file(file: Path) -> None:
    """Wait until what was written to a file is on the disk; nothing if there is none."""
    with suppress(FileNotFoundError), file.open("rb") as stream:
        os.fsync(stream.fileno())


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes have left unfinished in a folder and below it; nobody may be at work there."""
    for place, _, files in os.walk(folder):
        for name in files:
            if name.startswith(".") and name.endswith(_PARTIAL):
                remove(Path(place, name))


def reject_symlinks(folder: Path) -> None:
    """Refuse, by an `InputError`, links in a folder and below it: what is written there would go elsewhere."""
    for place, folders, files in os.walk(folder):
        for one in (Path(place, name) for name in (*folders, *files)):
            if one.is_symlink():
                raise InputError(f"{one} is a link, which leads out of the folder; put what is meant in its place")


def make_subfolder(folder: Path, name: str) -> Path:
    """Make a folder within a folder if it is not there.

    Raises
    ------
    InputError
        It is a link: what is written there would go elsewhere.
    OSError
        It cannot be made.
    """
    inner = folder / name
    if inner.is_symlink():
        raise InputError(f"{inner} is a link, which leads out of the folder; put what is meant in its place")
    inner.mkdir(exist_ok=True)
    return inner


def mmap_bytes(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> torch.Tensor:
    """The bytes of a file that is not empty ``(n,)``, uint8, in place and for reading only.

    All processes that map it share the memory; what is too large for the memory is read anew from the disk.
    """
    with open_regular_file(file, max_bytes=max_bytes) as stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)


def remove(file: Path) -> None:
    """Remove a file if there is one; raises `InputError` if something else has its place."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{file} cannot be removed ({error.strerror}); remove it yourself") from error


def round_file(folder: Path, round: int, kind: str = "pt") -> Path:
    """Where the version of a round is, or would be; ``kind`` is the end of the name."""
    return folder / f"round-{round:06d}.{kind}"


def saved_rounds(folder: Path, kind: str = "pt") -> list[int]:
    """Rounds of which there is a version, ascending."""
    names = (re.fullmatch(rf"round-(\d+)\.{kind}", file.name) for file in folder.glob(f"round-*.{kind}"))
    return sorted(int(name[1]) for name in names if name)


def new_run_folder() -> Path:
    """Make a new folder ``runs/<date>_<time>`` at once, so that two runs of the same second do not share it."""
    base = Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    for attempt in range(1000):
        folder = base.with_name(f"{base.name}-{attempt}") if attempt else base
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"the folder {folder} cannot be made ({error.strerror}); set output_dir=...") from error
        return folder
    raise InputError(f"{base} and 999 more folders exist; set output_dir=...")


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot
            raise
    finally:
        os.close(descriptor)
