"""Where clients have what they keep: in their files, and for clients of one process in its memory as well."""

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from client_app.state import load_state, save_state
from fedssl.machine.memory import available_memory
from fedssl.untrusted import check_tensors_like
from strategies.base import ClientState


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
