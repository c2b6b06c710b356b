"""Where clients have what they keep: in their files, and for clients of one process in its memory as well."""

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from client_app.state import check, load_state, save_state
from fedssl.machine.memory import available_memory
from strategies.base import State


class Store(Protocol):
    """Loads and saves states, as `load_state` and `save_state` do."""

    def load(self, folder: Path, *, before: int, like: Mapping[str, torch.Tensor]) -> State | None: ...

    def save(self, folder: Path, state: State, *, round: int, keep_from: int) -> None: ...


class Files:
    """The files and nothing else: what is saved is on the disk."""

    def load(self, folder: Path, *, before: int, like: Mapping[str, torch.Tensor]) -> State | None:
        """See `load_state`."""
        return load_state(folder, before=before, like=like)

    def save(self, folder: Path, state: State, *, round: int, keep_from: int) -> None:
        """See `save_state`."""
        save_state(folder, state, round=round, keep_from=keep_from)


FILES: Store = Files()


@dataclass(frozen=True)
class _Saved:
    """A state, the round after which it is, and the writing of its file."""

    state: State
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
    most : int, optional
        Bytes of the states in memory; those that were saved first make room, when they are written. None: an eighth of
        the memory that is available.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = (available_memory() or 2**33) // 8 if most is None else most
        self._saved: OrderedDict[Path, _Saved] = OrderedDict()
        self._size = 0
        self._failed: BaseException | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="states")

    def __enter__(self) -> "WriteBehind":
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown()

    def load(self, folder: Path, *, before: int, like: Mapping[str, torch.Tensor]) -> State | None:
        """The state of the last round before round ``before``, for reading only; see `load_state`."""
        saved = self._saved.get(folder)
        if saved is not None and saved.round < before:
            try:
                check(saved.state, like)
                return saved.state
            except ValueError:
                pass  # as with a damaged file: what was saved before it
        if saved is not None:
            saved.written.exception()  # waits
        return load_state(folder, before=before, like=like)

    def save(self, folder: Path, state: State, *, round: int, keep_from: int) -> None:
        """Keep the state, which must not change from here on, and let it be written; see `save_state`."""
        self._forget(folder)
        written = self._executor.submit(save_state, folder, state, round=round, keep_from=keep_from)
        self._saved[folder] = _Saved(state, round, written)
        self._size += self._saved[folder].size
        while self._size > self._most:
            self._forget(next(iter(self._saved)))

    def settle(self) -> None:
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
