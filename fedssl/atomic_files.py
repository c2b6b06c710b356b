"""Atomic file writes, files with one version per round, and the folder of a new run.

Atomic writes replace an existing file at once; a crash leaves the previous version.
"""

import errno
import mmap
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fedssl.errors import InputError
from fedssl.safe_io import open_regular_file

_PARTIAL = ".partial"  # suffix of incomplete files


def atomic_write(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file by ``write`` and rename it to ``file``; both are flushed to the disk before this returns.

    Neither a crash nor a power failure leaves an incomplete file.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}{_PARTIAL}")
    try:
        partial.unlink(missing_ok=True)  # it may be a link that another user made
        with partial.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
        fsync_folder(file.parent)
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(file)  # errors of writing have none
        raise
    except RuntimeError as error:
        # torch's writer replaces errors of the file system and interrupts by its own.
        if isinstance(error.__context__, OSError | KeyboardInterrupt | SystemExit):
            raise error.__context__ from None
        raise
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically, UTF-8."""
    atomic_write(file, lambda stream: stream.write(text.encode()))


def append_text(file: Path, text: str) -> None:
    """Append to a text file, UTF-8; `fsync_file` flushes it to the disk."""
    with file.open("ab") as stream:
        stream.write(text.encode())


def fsync_file(file: Path) -> None:
    """Flush a file to the disk if it exists."""
    with suppress(FileNotFoundError), file.open("rb") as stream:
        os.fsync(stream.fileno())


def remove_partial_files(folder: Path, *, of_running: bool = True) -> None:
    """Remove incomplete files of killed processes from a folder and its subfolders.

    No process may be writing there, unless those of other processes that run are kept: ``of_running`` is false.
    """
    for file in folder.rglob(f".*{_PARTIAL}"):
        pid = file.name.split(".")[-2]
        if of_running or not pid.isdecimal() or int(pid) == os.getpid() or not process_exists(int(pid)):
            remove(file)


def process_exists(pid: int) -> bool:
    """Return whether there is a process of this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def reject_symlinks(folder: Path) -> None:
    """Reject, by an `InputError`, symbolic links in a folder and its subfolders, which would redirect writes."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise InputError(f"{path} is a symbolic link; replace it by the file or folder it refers to")


def make_subfolder(folder: Path, name: str) -> Path:
    """Create a subfolder if it does not exist; `InputError` if it is a symbolic link, which would redirect writes."""
    inner = folder / name
    if inner.is_symlink():
        raise InputError(f"{inner} is a symbolic link; replace it by the folder it refers to")
    inner.mkdir(exist_ok=True)
    return inner


def map_file(file: Path, *, size: int) -> mmap.mmap:
    """Map a file of ``size`` bytes, above 0, into memory, read-only.

    An OSError if the file is larger, a ValueError if it is smaller. All processes that map the file share its memory;
    pages that do not fit are reread from the disk.
    """
    with open_regular_file(file, max_bytes=size) as stream:
        return mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)


def remove(file: Path) -> None:
    """Remove a file if it exists; raise `InputError` if it cannot be removed."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{file} cannot be removed ({error.strerror}); remove it yourself") from error


def round_file(folder: Path, round: int, kind: str = "pt") -> Path:
    """Return the path of the version of a round; ``kind`` is the file name extension."""
    return folder / f"round-{round:06d}.{kind}"


def saved_rounds(folder: Path, kind: str = "pt") -> list[int]:
    """Return the rounds with a saved version, ascending."""
    names = (re.fullmatch(rf"round-(\d+)\.{kind}", file.name) for file in folder.glob(f"round-*.{kind}"))
    return sorted(int(name[1]) for name in names if name)


def delete_old_rounds(folder: Path, kind: str, *, oldest_resumable: int) -> None:
    """Delete versions that no run needs which is resumed from the round ``oldest_resumable`` or later."""
    for version in [saved for saved in saved_rounds(folder, kind) if saved <= oldest_resumable][:-1]:
        remove(round_file(folder, version, kind))


def new_run_folder() -> Path:
    """Create a new folder ``runs/<date>_<time>``."""
    return new_folder(Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve(), "output_dir")


def new_folder(base: Path, setting: str) -> Path:
    """Create a new folder, with a number behind its name if it exists, such as of a run that started in this second.

    ``setting`` names another one in errors.
    """
    for attempt in range(1000):
        folder = base.with_name(f"{base.name}-{attempt}") if attempt else base
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"the folder {folder} cannot be created ({error.strerror}); set {setting}=...") from error
        return folder
    raise InputError(f"{base} and 999 more folders exist; set {setting}=...")


def make_output_folder(folder: Path, setting: str = "output_dir") -> None:
    """Create the folder that ``setting`` names if it is missing; raises `InputError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{setting}={folder} cannot be written ({error.strerror}); choose a folder that you may write to"
        ) from error


def fsync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by the file system
            raise
    finally:
        os.close(descriptor)
