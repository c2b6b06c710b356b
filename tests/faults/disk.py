"""A disk that fails, and a process that is killed, at a file operation of a run.

Operations on files of a run folder are counted: opening for writing, half an appended text, fsync, rename, unlink and
mkdir. At one of them the process is killed, which fails all later operations too; or the operation raises an `OSError`,
once or from then on. After a power failure only content and names that were flushed by fsync are left.
"""

import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedssl.runs import manifest

STATES = f".{manifest.STATE_SUFFIX}"


class Killed(BaseException):
    """The process ends here."""


class Disk:
    """File operations of one run folder. ``fail_at`` is the number of the operation that fails; 0: none.

    ``error`` is None for a kill, or the number of an `OSError`, which is raised once if ``once``.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.count, self.fail_at, self.error, self.once, self.only = 0, 0, None, False, ""
        self.process = os.getpid()
        patch.setattr(os, "getpid", lambda: self.process)
        self._text = ""  # that is being appended
        self._content: dict[int, bytes] = {}  # flushed content by inode
        self._names: dict[Path, dict[str, int]] = {}  # flushed names of each folder
        self._original: dict[str, Callable[..., Any]] = {}
        for module, name, wrapper in (
            (os, "fsync", self._fsync),
            (os, "replace", self._rename),
            (os, "unlink", self._unlink),
            (os, "mkdir", self._mkdir),
            (io, "open", self._open),
            (manifest, "append_text", self._append),
        ):
            self._original[name] = getattr(module, name)
            patch.setattr(module, name, wrapper)

    def begin(self, fail_at: int, *, error: int | None = None, once: bool = False, only: str = "") -> None:
        """Start a new process: all files are on the disk. With ``only`` operations of that kind are counted alone."""
        self.count, self.fail_at, self.error, self.once, self.only = 0, fail_at, error, once, only
        self.process += 1
        self._content.clear()
        self._names.clear()
        for file in self._files():
            self._content[file.stat().st_ino] = file.read_bytes()
        for folder in self._folders():
            self._names[folder] = _inodes(folder)

    @property
    def has_failed(self) -> bool:
        return 0 < self.fail_at <= self.count

    def lose_unflushed(self) -> None:
        """Restore what was flushed: the power failed."""
        self.fail_at = 0
        flushed = {
            folder / name: self._content.get(inode, b"")
            for folder in self._folders()
            for name, inode in self._names.get(folder, {}).items()
        }
        for file in self._files():
            self._original["unlink"](file)
        for file, content in flushed.items():
            file.write_bytes(content)

    # --- operations ---

    def _step(self, path: Path, kind: str) -> None:
        if not path.is_relative_to(self.folder) or self.only not in ("", kind):
            return
        self.count += 1
        if self.fail_at and (self.count == self.fail_at or (self.count > self.fail_at and not self.once)):
            if self.error is None:
                raise Killed
            raise OSError(self.error, os.strerror(self.error))

    def _fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self._step(path, "fsync")
        self._original["fsync"](descriptor)
        if path.is_relative_to(self.folder):
            if path.is_dir():
                self._names[path] = _inodes(path)
            elif path.exists():
                self._content[path.stat().st_ino] = path.read_bytes()

    def _rename(self, source: Any, target: Any) -> None:
        self._step(Path(source), "rename")
        self._original["replace"](source, target)

    def _unlink(self, path: Any, **options: Any) -> None:
        self._step(Path(path), "unlink")
        self._original["unlink"](path, **options)

    def _mkdir(self, path: Any, *options: Any, **more: Any) -> None:
        self._step(Path(path), "mkdir")
        self._original["mkdir"](path, *options, **more)

    def _open(self, file: Any, mode: str = "r", *options: Any, **more: Any) -> Any:
        path = Path(file) if isinstance(file, str | Path) else Path()
        if not set("wax+") & set(mode) or path.name in ("run.log", ".lock"):
            return self._original["open"](file, mode, *options, **more)
        try:
            self._step(path, "append" if "a" in mode else "open")
        except BaseException:
            if "a" in mode and self.count == self.fail_at:  # half of the text is on the disk
                with self._original["open"](file, "a") as stream:
                    stream.write(self._text[: len(self._text) // 2])
            raise
        is_new = not path.exists()
        stream = self._original["open"](file, mode, *options, **more)
        if is_new and path.is_relative_to(self.folder):
            self._content.pop(path.stat().st_ino, None)
        return stream

    def _append(self, file: Path, text: str) -> None:
        self._text = text
        self._original["append_text"](file, text)

    def _files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def _folders(self) -> list[Path]:
        if not self.folder.exists():
            return []
        return [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]


def _inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.is_file()}


DISK_FULL, FAILED_WRITE = errno.ENOSPC, errno.EIO


def damage(folder: Path, kind: str, number: int) -> Path:
    """Damage a file of a run folder that a resumed run reads; return it."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and "models" not in path.parts  # snapshots
        and path.suffix in (".pt", STATES, ".json", ".jsonl", ".csv", ".yaml")
        and path.stat().st_size
    )
    states = [path for path in files if path.suffix == STATES]
    files = states if states and number % 2 else files
    file = files[number // 2 % len(files)]
    content = file.read_bytes()
    at = number % len(content)
    if kind == "delete":
        file.unlink()
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :])
    elif kind == "truncate":
        file.write_bytes(content[:at])
    elif kind == "double":
        file.write_bytes(content + content)
    else:
        file.write_bytes(b"")
    return file


DAMAGES = ("delete", "folder", "flip", "truncate", "double", "empty")


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
