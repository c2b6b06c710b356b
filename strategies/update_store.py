"""Updates of a round: in memory up to a budget, beyond it in a temporary file.

Strategies that need all updates at once read them in tiles of columns, the same numbers of every client. The results do
not depend on where the updates are. The file has blocks of `BLOCK` clients, and in a block pieces of `PIECE` numbers
of each layer, client by client. A pass over all tiles reads the file once, in consecutive parts of `BLOCK` times
`PIECE` numbers. It is read into buffers instead of being mapped, so that a disk error is an exception.
"""

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from fedssl.arrays import BLAS_ROW, GlobalLayers, Layers
from fedssl.machine.memory import available_memory

MEMORY_SHARE = 4  # updates use at most one part in four of the available memory
_UNKNOWN_MEMORY = 2**33  # bytes that are assumed to be available where the system does not report them

BLOCK = 32  # clients whose pieces are next to each other in the file
PIECE = 8 * BLAS_ROW  # numbers of a layer of one client that are next to each other


def memory_budget() -> int:
    """Return the bytes of updates that may be in memory."""
    available = available_memory()
    return (_UNKNOWN_MEMORY if available is None else available) // MEMORY_SHARE


class UpdateStorage:
    """Memory and disk for the updates of one round, which its stores share.

    ``folder`` is that of the file, by default the system's folder of temporary files. ``memory`` is the budget in
    bytes, by default `memory_budget`.
    """

    def __init__(self, folder: Path | None = None, *, memory: int | None = None) -> None:
        self.folder = folder
        self._free = memory_budget() if memory is None else memory
        self._stores: list[UpdateStore] = []

    def new_store(self, reference: GlobalLayers) -> "UpdateStore":
        """Return an empty store of updates with the names, shapes and dtypes of ``reference``."""
        store = UpdateStore(reference, self)
        self._stores.append(store)
        return store

    def reserve(self, num_bytes: int) -> bool:
        """Return whether this much memory is free, and reserve it."""
        if num_bytes > self._free:
            return False
        self._free -= num_bytes
        return True

    def close(self) -> None:
        """Release all updates."""
        for store in self._stores:
            store.close()
        self._stores = []


class UpdateStore:
    """The layers of updates, in the order of `add`. Created by `UpdateStorage.new_store`.

    ``reference`` are layers with the same names, shapes and dtypes.
    """

    def __init__(self, reference: GlobalLayers, storage: UpdateStorage) -> None:
        self.reference, self._storage = reference, storage
        self._bytes = sum(array.nbytes for array in reference.layers.values())
        self._in_memory: list[Layers] = []  # the first updates
        self._file: _UpdateFile | None = None  # of all others

    def __len__(self) -> int:
        return len(self._in_memory) + (self._file.number if self._file else 0)

    def add(self, layers: Layers) -> None:
        """Add an update by reference, or write it to the file. Raises `OSError` if the disk is full."""
        if self._file is None and self._storage.reserve(self._bytes):
            self._in_memory.append({name: layers[name] for name in self.reference.layers})
            return
        if self._file is None:
            self._file = _UpdateFile(self.reference.layers, self._storage.folder)
        try:
            self._file.add(layers)
        except OSError:
            self.close()  # the space is needed for the checkpoint of the last round
            raise

    def layers(self, index: int) -> Layers:
        """Return the layers of an update; of those in the file, a copy."""
        if index < len(self._in_memory):
            return self._in_memory[index]
        assert self._file is not None
        clients = [index - len(self._in_memory)]
        return {
            name: _Columns(self._file, name, array, clients, array.size)
            .read(slice(0, array.size))[0]
            .reshape(array.shape)
            for name, array in self.reference.layers.items()
        }

    def tiles(
        self, name: str, step: int, indices: Sequence[int] | None = None
    ) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """Yield each tile of ``step`` numbers of a flattened layer, with the numbers of each update in it.

        ``indices`` are ascending; by default all updates. The arrays must not be changed, and are valid until the next
        tile.
        """
        chosen = range(len(self)) if indices is None else indices
        array, first = self.reference.layers[name], len(self._in_memory)
        kept = [self._in_memory[index][name].reshape(-1) for index in chosen if index < first]
        stored = [index - first for index in chosen if index >= first]
        columns = _Columns(self._file, name, array, stored, step) if self._file and stored else None
        for start in range(0, array.size, step):
            tile = slice(start, min(start + step, array.size))
            yield tile, [values[tile] for values in kept] + (columns.read(tile) if columns else [])

    def close(self) -> None:
        """Release the updates."""
        self._in_memory = []
        if self._file is not None:
            self._file.close()
            self._file = None


def in_memory(updates: Sequence[Layers]) -> UpdateStore:
    """Return a store of updates that are in memory."""
    store = UpdateStorage(memory=2**63).new_store(GlobalLayers(updates[0] if updates else {}))
    for layers in updates:
        store.add(layers)
    return store


class CollectingAggregator:
    """Base class of aggregators that keep all updates of a round, in ``storage``. It declares that they do.

    The round sets ``storage`` before `start`.
    """

    storage: UpdateStorage | None = None

    def new_store(self, reference: GlobalLayers) -> UpdateStore:
        """Return an empty store for the updates of the round."""
        return (self.storage or UpdateStorage()).new_store(reference)

    def working_memory(self, layers: Layers, number: int) -> int:
        """Return about how many bytes `finish` needs besides the models and this number of updates of ``layers``."""
        raise NotImplementedError


class _UpdateFile:
    """A file of updates without a name, so that it is deleted when the process ends."""

    def __init__(self, layers: Layers, folder: Path | None) -> None:
        self.number = 0  # of updates
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open for a round
        self._starts: dict[str, int] = {}  # of the layers of one client, in bytes
        self._bytes = 0  # of one client
        for name, array in layers.items():
            self._starts[name] = self._bytes
            self._bytes += array.nbytes

    def add(self, layers: Layers) -> None:
        for name in self._starts:
            values = np.ascontiguousarray(layers[name]).reshape(-1)
            for start in range(0, values.size, PIECE):
                piece = values[start : start + PIECE]
                self._write(piece.view(np.uint8), self._offset(self.number, name, start, piece))
        self.number += 1

    def read(self, name: str, clients: Sequence[int], start: int, rows: np.ndarray) -> None:
        """Read the piece that starts at the number ``start``; ``clients`` are consecutive, in one block."""
        read = os.preadv(self._file.fileno(), list(rows), self._offset(clients[0], name, start, rows[0]))
        if read != rows.nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def close(self) -> None:
        self._file.close()

    def _offset(self, client: int, name: str, start: int, piece: np.ndarray) -> int:
        block, position = divmod(client, BLOCK)
        return BLOCK * (block * self._bytes + self._starts[name] + start * piece.itemsize) + position * piece.nbytes

    def _write(self, data: np.ndarray, offset: int) -> None:
        while data.size:
            written = os.pwrite(self._file.fileno(), data.data, offset)
            data, offset = data[written:], offset + written


class _Columns:
    """Consecutive tiles of a layer of some clients of a file, at most ``step`` numbers wide."""

    def __init__(self, file: _UpdateFile, name: str, array: np.ndarray, clients: Sequence[int], step: int) -> None:
        self._file, self._name, self._size = file, name, array.size
        self._runs = [
            [client for _, client in run]
            for _, run in groupby(enumerate(clients), lambda pair: (pair[1] // BLOCK, pair[1] - pair[0]))
        ]
        self._buffer = np.empty((len(clients), min(step + PIECE, array.size)), array.dtype)
        self._start = self._end = 0  # of the columns in the buffer

    def read(self, tile: slice) -> list[np.ndarray]:
        """Return the numbers of each client in the tile that follows the last one."""
        if self._end < tile.stop:
            kept = self._buffer[:, tile.start - self._start : self._end - self._start]
            self._buffer[:, : kept.shape[1]] = kept
            self._start = tile.start
        while self._end < tile.stop:
            width, column, row = min(PIECE, self._size - self._end), self._end - self._start, 0
            for run in self._runs:
                rows = self._buffer[row : row + len(run), column : column + width]
                self._file.read(self._name, run, self._end, rows)
                row += len(run)
            self._end += width
        return list(self._buffer[:, tile.start - self._start : tile.stop - self._start])
