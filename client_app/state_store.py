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

STATE_SUFFIX = "state"  # end of the files' names
_HEADER = struct.Struct("<8sQQ40x")  # mark, bytes of the list, sum of all that follows the preface
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
    """The state of the last round before round ``before``; None if the client kept nothing until then.

    A damaged one is named in the log and the one before it is used, also where a tensor differs in shape or dtype from
    the one of its name in ``template``, or is not finite.
    """
    for round in reversed(saved_rounds(folder, STATE_SUFFIX)):
        if round < before:
            file = round_file(folder, round, STATE_SUFFIX)
            try:
                state = read_state(file, max_bytes=MAX_TENSORS_BYTES if template is None else _max_bytes(template))
                check_tensors_like(state, template or {})
                return state
            except Exception as error:  # there is no end to how reading a damaged file can fail
                log.warning("%s is damaged (%s); trying the one before", file, error)
    return None


def save_state(folder: Path, state: ClientState, *, round: int, keep_from: int) -> None:
    """Write the state after ``round``, all of it or nothing, and drop versions that no resumed run can ask for.

    Parameters
    ----------
    keep_from : int
        Oldest round that a resumed run may go back to: the newest version up to it stays, older ones go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = [(name, str(value.dtype), list(value.shape)) for name, value in state.items()]
    text = _padded(np.frombuffer(json.dumps(listed).encode(), dtype=np.uint8))
    pieces = [text, *(_padded(value.flatten().view(torch.uint8).numpy()) for value in state.values())]
    preface = _HEADER.pack(_MARK, len(text), sum(map(_sum, pieces)) % 2**64)

    def write(stream: BinaryIO) -> None:
        stream.write(preface)
        stream.writelines(piece.data for piece in pieces)

    atomic_write(round_file(folder, round, STATE_SUFFIX), write)
    reachable = [version for version in saved_rounds(folder, STATE_SUFFIX) if version <= keep_from]
    for version in reachable[:-1]:
        round_file(folder, version, STATE_SUFFIX).unlink(missing_ok=True)


def read_state(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> ClientState:
    """Read one file; the tensors lie in it, for reading only.

    Raises
    ------
    OSError, ValueError
        It is not whole, something else, or larger than ``max_bytes`` bytes.
    """
    content = mmap_bytes(file, max_bytes=max_bytes)
    mark, length, total = _HEADER.unpack_from(content.numpy().data)
    body = content[_HEADER.size :]
    if mark != _MARK or _sum(body.numpy()) != total:
        raise ValueError("it is not as it was written")
    state, start = {}, length
    for name, dtype, shape in json.loads(body[:length].numpy().tobytes().rstrip(b"\0")):
        if not isinstance(name, str) or not all(isinstance(number, int) and number >= 0 for number in shape):
            raise ValueError("its list is not one of tensors")
        size = _DTYPES[dtype].itemsize * math.prod(shape)
        state[name] = body[start : start + size].view(_DTYPES[dtype]).reshape(shape)
        start += -(-size // _ALIGNED) * _ALIGNED
    if start != len(body):
        raise ValueError("its list does not fit its length")
    return state


def _max_bytes(template: Mapping[str, torch.Tensor]) -> int:
    """Bytes that a file may have: an algorithm may keep a few models."""
    return 2**24 + 8 * sum(value.nbytes for value in template.values())


def _padded(piece: np.ndarray) -> np.ndarray:
    """Bytes, with zeros up to a multiple of `_ALIGNED`."""
    rest = -len(piece) % _ALIGNED
    return np.pad(piece, (0, rest)) if rest else piece


def _sum(piece: np.ndarray) -> int:
    """Sum of the bytes in words of eight, which tells a damaged file at the speed of memory."""
    return int(np.add.reduce(piece.view(np.uint64)))


class StateStore(Protocol):
    """Loads and saves states, as `load_state` and `save_state` do."""

    def load(self, folder: Path, *, before: int, template: Mapping[str, torch.Tensor]) -> ClientState | None: ...

    def save(self, folder: Path, state: ClientState, *, round: int, keep_from: int) -> None: ...


class FileStateStore:
    """The files and nothing else: what is saved is on the disk."""

    def load(self, folder: Path, *, before: int, template: Mapping[str, torch.Tensor]) -> ClientState | None:
        """See `load_state`."""
        return load_state(folder, before=before, template=template)

    def save(self, folder: Path, state: ClientState, *, round: int, keep_from: int) -> None:
        """See `save_state`."""
        save_state(folder, state, round=round, keep_from=keep_from)


FILE_STORE: StateStore = FileStateStore()


@dataclass(frozen=True)
class _PendingState:
    """A state, the round after which it is, and the writing of its file."""

    state: ClientState
    round: int
    written: Future[None]

    @property
    def size(self) -> int:
        return sum(value.nbytes for value in self.state.values())


class WriteBehind:
    """The files, and before them the memory: what is saved is written in a thread, while the next client trains.

    For folders that only this process writes to. As a context manager it ends when all is written.

    Parameters
    ----------
    max_bytes : int, optional
        Bytes of the states in memory; those that were saved first make room, when they are written. None: an eighth of
        the memory that is available.
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
        """The state of the last round before round ``before``, for reading only; see `load_state`."""
        saved = self._saved.get(folder)
        if saved is not None and saved.round < before:
            try:
                check_tensors_like(saved.state, template)
                return saved.state
            except ValueError:
                pass  # as with a damaged file: what was saved before it
        if saved is not None:
            saved.written.exception()  # waits
        return load_state(folder, before=before, template=template)

    def save(self, folder: Path, state: ClientState, *, round: int, keep_from: int) -> None:
        """Keep the state, which must not change from here on, and let it be written; see `save_state`."""
        self._forget(folder)
        written = self._executor.submit(save_state, folder, state, round=round, keep_from=keep_from)
        self._saved[folder] = _PendingState(state, round, written)
        self._size += self._saved[folder].size
        while self._size > self._max_bytes:
            self._forget(next(iter(self._saved)))

    def flush(self) -> None:
        """Return when all is written; raises what prevented that."""
        for saved in self._saved.values():
            saved.written.result()
        if self._failed is not None:
            raise self._failed

    def _forget(self, folder: Path) -> None:
        saved = self._saved.pop(folder, None)
        if saved is not None:
            self._size -= saved.size
            self._failed = self._failed or saved.written.exception()
