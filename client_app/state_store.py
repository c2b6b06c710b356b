"""Client state between rounds: files on the client's disk, one version per round in which it took part.

Versions make a resumed run exact: a run that resumes after round r loads what each client had saved before round r + 1,
even if the client has saved newer versions.

A file is a header (`_HEADER`), a JSON list of the tensors, and their bytes, each tensor aligned to 64 bytes. It is
memory-mapped, so loading a state costs only the copy into the model, and no content is executed.
"""

import json
import logging
import math
import struct
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import torch

from fedssl.atomic_files import atomic_write, mmap_bytes, round_file, saved_rounds
from fedssl.machine.memory import available_memory
from fedssl.untrusted import MAX_TENSORS_BYTES, check_tensors_like
from strategies.interfaces import ClientState

log = logging.getLogger("fedssl")

STATE_SUFFIX = "state"  # of file names
_HEADER = struct.Struct("<8sQQ40x")  # magic number, bytes of the list, checksum of all that follows the header
_MARK = b"fedssl 1"
_ALIGNED = 64
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def load_state(folder: Path, *, before: int, template: Mapping[str, torch.Tensor] | None = None) -> ClientState | None:
    """Return the state of the last round before round ``before``, or None if there is none.

    A damaged file is logged, and the previous one is used. A file is also damaged if a tensor is non-finite or differs
    in shape or dtype from that of its name in ``template``.
    """
    for round in reversed(saved_rounds(folder, STATE_SUFFIX)):
        if round < before:
            file = round_file(folder, round, STATE_SUFFIX)
            try:
                state = read_state(file, max_bytes=MAX_TENSORS_BYTES if template is None else _max_bytes(template))
                check_tensors_like(state, template or {})
                return state
            except Exception as error:  # a damaged file can raise anything
                log.warning("%s is damaged (%s); trying the previous one", file, error)
    return None


def save_state(folder: Path, state: ClientState, *, round: int, keep_from: int) -> None:
    """Write the state after ``round`` atomically, and delete versions that no resumed run can need.

    Parameters
    ----------
    keep_from : int
        Oldest round from which a run can be resumed. The newest version up to it stays, older ones are deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = [(name, str(value.dtype), list(value.shape)) for name, value in state.items()]
    text = _padded(np.frombuffer(json.dumps(listed).encode(), dtype=np.uint8))
    pieces = [text, *(_padded(value.flatten().view(torch.uint8).numpy()) for value in state.values())]
    header = _HEADER.pack(_MARK, len(text), sum(map(_sum, pieces)) % 2**64)

    def write(stream: BinaryIO) -> None:
        stream.write(header)
        stream.writelines(piece.data for piece in pieces)

    atomic_write(round_file(folder, round, STATE_SUFFIX), write)
    reachable = [version for version in saved_rounds(folder, STATE_SUFFIX) if version <= keep_from]
    for version in reachable[:-1]:
        round_file(folder, version, STATE_SUFFIX).unlink(missing_ok=True)


def read_state(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> ClientState:
    """Read one file. The tensors are memory-mapped and read-only.

    Raises
    ------
    OSError, ValueError
        The file is incomplete, of another format, or larger than ``max_bytes``.
    """
    content = mmap_bytes(file, max_bytes=max_bytes)
    mark, length, total = _HEADER.unpack_from(content.numpy().data)
    body = content[_HEADER.size :]
    if mark != _MARK or _sum(body.numpy()) != total:
        raise ValueError("the checksum is wrong")
    state, start = {}, length
    for name, dtype, shape in json.loads(body[:length].numpy().tobytes().rstrip(b"\0")):
        if not isinstance(name, str) or not all(isinstance(number, int) and number >= 0 for number in shape):
            raise ValueError("the list of tensors is invalid")
        size = _DTYPES[dtype].itemsize * math.prod(shape)
        state[name] = body[start : start + size].view(_DTYPES[dtype]).reshape(shape)
        start += -(-size // _ALIGNED) * _ALIGNED
    if start != len(body):
        raise ValueError("the list does not fit the length")
    return state


def _max_bytes(template: Mapping[str, torch.Tensor]) -> int:
    """Return the maximum size of a file: a strategy may save a few models."""
    return 2**24 + 8 * sum(value.nbytes for value in template.values())


def _padded(piece: np.ndarray) -> np.ndarray:
    """Return the bytes, padded with zeros to a multiple of `_ALIGNED`."""
    rest = -len(piece) % _ALIGNED
    return np.pad(piece, (0, rest)) if rest else piece


def _sum(piece: np.ndarray) -> int:
    """Return the sum of the 64-bit words, a checksum at memory speed."""
    return int(np.add.reduce(piece.view(np.uint64)))


class StateStore(Protocol):
    """Loads and saves states like `load_state` and `save_state`."""

    def load(self, folder: Path, *, before: int, template: Mapping[str, torch.Tensor]) -> ClientState | None: ...

    def save(self, folder: Path, state: ClientState, *, round: int, keep_from: int) -> None: ...


class FileStateStore:
    """Store of files only. A saved state is on the disk."""

    def load(self, folder: Path, *, before: int, template: Mapping[str, torch.Tensor]) -> ClientState | None:
        """Call `load_state`."""
        return load_state(folder, before=before, template=template)

    def save(self, folder: Path, state: ClientState, *, round: int, keep_from: int) -> None:
        """Call `save_state`."""
        save_state(folder, state, round=round, keep_from=keep_from)


FILE_STORE: StateStore = FileStateStore()


@dataclass(frozen=True)
class _PendingState:
    """A state, its round, and the pending write of its file."""

    state: ClientState
    round: int
    written: Future[None]

    @property
    def size(self) -> int:
        return sum(value.nbytes for value in self.state.values())


class WriteBehind:
    """Store of files with a cache in memory: a thread writes a saved state while the next client trains.

    For folders to which only this process writes. As a context manager it waits for all writes.

    Parameters
    ----------
    max_bytes : int, optional
        Maximum size of the states in memory. The oldest are evicted after they are written. None is an eighth of the
        available memory.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = (available_memory() or 2**33) // 8 if max_bytes is None else max_bytes
        self._saved: OrderedDict[Path, _PendingState] = OrderedDict()
        self._size = 0
        self._failed: BaseException | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="states")

    def __enter__(self) -> "WriteBehind":
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown()

    def load(self, folder: Path, *, before: int, template: Mapping[str, torch.Tensor]) -> ClientState | None:
        """Return the state of the last round before round ``before``, read-only. See `load_state`."""
        saved = self._saved.get(folder)
        if saved is not None and saved.round < before:
            try:
                check_tensors_like(saved.state, template)
                return saved.state
            except ValueError:
                pass  # as for a damaged file, use the previous version
        if saved is not None:
            saved.written.exception()  # waits
        return load_state(folder, before=before, template=template)

    def save(self, folder: Path, state: ClientState, *, round: int, keep_from: int) -> None:
        """Cache the state, which must not change afterwards, and write it in the background. See `save_state`."""
        self._forget(folder)
        written = self._executor.submit(save_state, folder, state, round=round, keep_from=keep_from)
        self._saved[folder] = _PendingState(state, round, written)
        self._size += self._saved[folder].size
        while self._size > self._max_bytes:
            self._forget(next(iter(self._saved)))

    def flush(self) -> None:
        """Wait for all writes. Raises the first error."""
        for saved in self._saved.values():
            saved.written.result()
        if self._failed is not None:
            raise self._failed

    def _forget(self, folder: Path) -> None:
        saved = self._saved.pop(folder, None)
        if saved is not None:
            self._size -= saved.size
            self._failed = self._failed or saved.written.exception()
