"""Manifests: the files of a run folder that belong to a checkpoint, with their sizes and digests.

A checkpoint of round r is complete with the lines of all rounds up to r, and with the newest state up to round r of
every client of the same machine. A run resumes only from a checkpoint whose files are all intact.
"""

import json
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.atomic_files import append_text, remove, round_file, saved_rounds, write_text
from fedssl.digests import checksum, new_checksum
from fedssl.safe_io import MAX_LINES_BYTES, MAX_TENSORS_BYTES, corrupt_file_error, open_regular_file, read_text

if TYPE_CHECKING:
    import xxhash

JSONL_FILES = ("metrics.jsonl", "clients.jsonl", "health.jsonl")
CLIENT_STATES = "clients"  # folder with one folder per client (see `client_folder`), which may have subfolders
STATE_SUFFIX = "safetensors"
CLIENT_MODELS = "client_models"  # folder with one folder per client that has a separate model on the server
MODEL_SUFFIX = "pt"
MANIFEST_SUFFIX = "json"
_CLIENTS_PER_FOLDER = 1000
_CHUNK_BYTES = 2**22
_MTIME_RESOLUTION = 10**9  # nanoseconds, of any file system


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint."""

    path: str  # relative to the run folder
    size: int  # in bytes; a file of lines may have grown since
    digest: str  # XXH3 of these bytes, 64 bits

    @property
    def grows(self) -> bool:
        return self.path in JSONL_FILES

    def problem(self, folder: Path) -> str | None:
        """Return what is wrong with the file in a run folder, or None if it is intact."""
        file = folder / self.path
        if self.grows and not self.size:
            return None
        try:
            if file.exists() and not file.is_file():
                return f"{self.path} is not a file"
            size = file.stat().st_size
            if size < self.size or (size > self.size and not self.grows):
                return f"{self.path} has {size} bytes instead of {self.size}"
            return None if digest_of(file, self.size) == self.digest else f"{self.path} is damaged"
        except FileNotFoundError:
            return f"{self.path} is missing"
        except OSError as error:
            return f"{self.path} cannot be read ({error.strerror})"


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, and one sentence for every damage after which the run resumed from an earlier one."""

    parts: tuple[Part, ...]
    recoveries: tuple[str, ...] = ()

    def problems(self, folder: Path) -> list[str]:
        """Return what is wrong with the files in a run folder; empty if all are intact."""
        return [problem for part in self.parts if (problem := part.problem(folder))]

    def size(self, path: str) -> int:
        """Return the number of bytes of a file; 0 if it is no part."""
        return next((part.size for part in self.parts if part.path == path), 0)


def write_manifest(file: Path, manifest: Manifest) -> None:
    """Write a manifest with its own digest."""
    text = json.dumps({"parts": [vars(part) for part in manifest.parts], "recoveries": manifest.recoveries})
    write_text(file, f"{checksum(text.encode())}\n{text}\n")


def read_manifest(file: Path) -> Manifest:
    """Read a manifest; raises `ValueError` if it is missing or damaged."""
    digest, _, text = (read_text(file, max_bytes=MAX_LINES_BYTES) or "").partition("\n")
    text = text.removesuffix("\n")
    if digest != checksum(text.encode()):
        raise ValueError(f"{file.name} is missing or damaged")
    content = json.loads(text)
    parts = tuple(Part(**part) for part in content["parts"])
    if any(Path(part.path).is_absolute() or ".." in Path(part.path).parts for part in parts):
        raise ValueError(f"{file.name} names files outside the run folder")
    return Manifest(parts, tuple(content["recoveries"]))


def digest_of(file: Path, size: int | None = None) -> str:
    """Return the digest of the first ``size`` bytes of a file; None: of all."""
    return _checksum_of(file, MAX_TENSORS_BYTES if size is None else size).hexdigest()


def _checksum_of(file: Path, size: int) -> "xxhash.xxh3_64":
    """Return the checksum of the first ``size`` bytes of a file, to be continued."""
    digest, left = new_checksum(), size
    with open_regular_file(file) as stream:
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest


def file_part(folder: Path, file: Path) -> Part:
    """Return the part of a complete file."""
    return Part(file.relative_to(folder).as_posix(), file.stat().st_size, digest_of(file))


def client_folder(parent: Path, client: int) -> Path:
    """Return the folder of a client of a simulation. No folder has more than a thousand subfolders."""
    return parent / f"{client // _CLIENTS_PER_FOLDER:04d}" / str(client)


class ClientStateParts:
    """The parts of the client states of a run folder. Only folders that have changed are read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, _StateFolder] = {}

    def up_to(self, round: int, *, without: Collection[int] = ()) -> list[Part]:
        """Return the newest version up to ``round`` in every folder: a run that resumes then loads it.

        Folders of the clients ``without`` do not belong to the checkpoint.
        """
        states = self._folder / CLIENT_STATES
        unused = {client_folder(states, client) for client in without}
        parts, folders = [], [states] if states.is_dir() else []
        while folders:
            folder = self._read(folders.pop(), round)
            parts += [folder.newest] if folder.newest else []
            folders += [subfolder for subfolder in folder.subfolders if subfolder not in unused]
        return sorted(parts, key=attrgetter("path"))

    def _read(self, folder: Path, round: int) -> "_StateFolder":
        changed, now = folder.stat().st_mtime_ns, time.time_ns()
        known = self._known.get(folder)
        if known is not None and known.changed == changed:
            return known
        versions = saved_rounds(folder, STATE_SUFFIX)
        reachable = [version for version in versions if version <= round]
        newest = file_part(self._folder, round_file(folder, reachable[-1], STATE_SUFFIX)) if reachable else None
        subfolders = [folder / entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        read = _StateFolder(changed, newest, subfolders)
        if versions == reachable and now - changed > _MTIME_RESOLUTION:  # else the next checkpoint has another version
            self._known[folder] = read
        return read


@dataclass(frozen=True)
class _StateFolder:
    changed: int  # modification time in nanoseconds, which versions and new subfolders change
    newest: Part | None
    subfolders: list[Path]


def remove_later_versions(folder: Path, round: int) -> None:
    """Remove the states and models of clients of a run folder that were written after ``round``."""
    for name, suffix in ((CLIENT_STATES, STATE_SUFFIX), (CLIENT_MODELS, MODEL_SUFFIX)):
        remove_versions_after(folder / name, suffix, round)


def remove_versions_after(folder: Path, suffix: str, round: int) -> None:
    """Remove the versions in a folder and its subfolders that were written after ``round``."""
    for parent in _folders(folder):
        for version in saved_rounds(parent, suffix):
            if version > round:
                remove(round_file(parent, version, suffix))


def _folders(folder: Path) -> list[Path]:
    return [Path(parent) for parent, _, _ in os.walk(folder)]


class LineFile:
    """A file to which a run appends lines, with the digest of its content after each of the last rounds."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._size, self._digest = 0, new_checksum()
        self._after: dict[int, Part] = {}
        self.end_round(0)

    def append(self, lines: Sequence[object]) -> None:
        """Append lines of JSON. `fedssl.atomic_files.fsync_file` flushes them to the disk."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        append_text(self.file, text)
        self._size += len(text.encode())
        self._digest.update(text.encode())

    def end_round(self, round: int) -> None:
        """Record that the lines of a round are complete."""
        self._after[round] = Part(self.file.name, self._size, self._digest.hexdigest())
        self._after = dict(list(self._after.items())[-2:])

    def part(self, round: int) -> Part:
        """Return the part of a checkpoint after ``round``, which is the last or the last but one."""
        return self._after[max(number for number in self._after if number <= round)]

    def restore(self, size: int, *, round: int) -> None:
        """Keep the first ``size`` bytes, which are intact and end with the lines of ``round``."""
        try:
            self._size, self._digest = size, _checksum_of(self.file, size) if size else new_checksum()
            if size:
                os.truncate(self.file, size)
            else:
                remove(self.file)
        except OSError as error:
            raise corrupt_file_error(self.file, str(error.strerror)) from error
        self._after.clear()
        self.end_round(round)
