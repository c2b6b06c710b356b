"""Client state between rounds: files on the client's disk, one version per round in which it took part.

Versions make a resumed run exact: a run that resumes after round r loads what each client had saved before round r + 1,
even if the client has saved newer versions.

Files are those of `fedssl.tensor_file`, with a checksum.
"""

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from fedssl.arrays import Layers
from fedssl.atomic_files import delete_old_rounds, round_file, saved_rounds
from fedssl.logs import log
from fedssl.machine.memory import available_memory
from fedssl.runs.manifest import STATE_SUFFIX
from fedssl.safe_io import MAX_TENSORS_BYTES, check_tensors_like
from fedssl.tensor_file import read_tensor_file, write_tensor_file
from strategies.types import ClientState


@dataclass(frozen=True)
class StoredState:
    """A state and the round after which it was saved."""

    tensors: ClientState
    round: int


def load_state(folder: Path, *, before: int, template: Mapping[str, torch.Tensor] | None = None) -> StoredState | None:
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
                return StoredState(state, round)
            except Exception as error:  # a damaged file can raise anything
                log.warning("%s is damaged (%s); trying the previous one", file, error)
    return None


def save_state(folder: Path, state: ClientState, *, round: int, oldest_resumable: int) -> None:
    """Write the state after ``round`` atomically, and delete versions that no resumed run can need.

    A run can be resumed from the round ``oldest_resumable`` or later: the newest version up to it stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensor_file(round_file(folder, round, STATE_SUFFIX), state, checked=True)
    delete_old_rounds(folder, STATE_SUFFIX, oldest_resumable=oldest_resumable)


def read_state(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> ClientState:
    """Read one file; raises any exception if it is damaged. The tensors are memory-mapped."""
    state, _ = read_tensor_file(file, max_bytes=max_bytes, checked=True)
    return state


def _max_bytes(template: Mapping[str, torch.Tensor]) -> int:
    return 2**24 + 8 * sum(value.nbytes for value in template.values())


@dataclass(frozen=True)
class LayerFiles:
    """Layers that mods keep beside the state of a client, see `strategies.mods.base.LayerCache`."""

    folder: Path  # of the client's states
    template: Mapping[str, torch.Tensor]  # tensors of the method, with whose names layers agree in shape and dtype

    def load(self, name: str, *, before: int) -> Layers:
        """Return the newest layers of a round before this one; none if there are none."""
        found = load_state(self.folder / name, before=before, template=self.template)
        return {layer: value.numpy() for layer, value in found.tensors.items()} if found else {}

    def save(self, name: str, layers: Layers, *, round: int, oldest_resumable: int) -> None:
        """Save layers after a round."""
        tensors = {layer: torch.from_numpy(array) for layer, array in layers.items()}
        save_state(self.folder / name, tensors, round=round, oldest_resumable=oldest_resumable)


class StateStore:
    """Store of files only, see `load_state` and `save_state`. A saved state is on the disk."""

    def load(self, folder: Path, *, before: int, template: Mapping[str, torch.Tensor]) -> StoredState | None:
        return load_state(folder, before=before, template=template)

    def save(self, folder: Path, state: ClientState, *, round: int, oldest_resumable: int) -> None:
        save_state(folder, state, round=round, oldest_resumable=oldest_resumable)


FILE_STORE = StateStore()


@dataclass(frozen=True)
class _PendingState(StoredState):
    written: Future[None]

    @property
    def size(self) -> int:
        return sum(value.nbytes for value in self.tensors.values())


class WriteBehind(StateStore):
    """Store of files with a cache in memory: a thread writes a saved state while the next client trains.

    For folders to which only this process writes. As a context manager it waits for all writes. If the states in memory
    are larger than ``max_bytes``, the oldest are dropped after they are written; None is an eighth of the available
    memory.
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

    def load(self, folder: Path, *, before: int, template: Mapping[str, torch.Tensor]) -> StoredState | None:
        """Return the state of the last round before round ``before``, read-only. See `load_state`."""
        saved = self._saved.get(folder)
        if saved is not None and saved.round < before:
            try:
                check_tensors_like(saved.tensors, template)
                return saved
            except ValueError:
                pass  # as for a damaged file, use the previous version
        if saved is not None:
            saved.written.exception()  # waits
        return super().load(folder, before=before, template=template)

    def save(self, folder: Path, state: ClientState, *, round: int, oldest_resumable: int) -> None:
        """Cache the state, which must not change afterwards, and write it in the background. See `save_state`."""
        self._forget(folder)
        written = self._executor.submit(save_state, folder, state, round=round, oldest_resumable=oldest_resumable)
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
