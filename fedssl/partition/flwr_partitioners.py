"""flwr-datasets' partitioners on an array of labels, without the imports of its package.

A partitioner maps labels to row numbers, but its package also imports the Hugging Face ``datasets``, pandas,
matplotlib, seaborn and scikit-learn. That takes 5 s in every process, more than the first rounds of a small run. It
also reads a column row by row, 5 s for 50,000 labels. The modules of the partitioners are therefore loaded as private
copies, with `LabelColumn` in place of ``datasets.Dataset``. Other imports of ``flwr_datasets`` and ``datasets`` get the
real modules. The draws are the same.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import numpy as np


class LabelColumn:
    """Replacement of a ``datasets.Dataset`` with one column; a selection is an array of row numbers."""

    def __init__(self, labels: np.ndarray) -> None:
        self._labels = labels
        self.num_rows = len(labels)

    def __getitem__(self, column: str) -> np.ndarray:
        """Return the labels of all rows."""
        return self._labels

    def unique(self, column: str) -> list[int]:
        """Return the sorted distinct labels."""
        return [int(label) for label in np.unique(self._labels)]

    def select(self, indices: Sequence[int]) -> np.ndarray:
        """Return ``indices`` as row numbers."""
        return np.asarray(indices, dtype=np.int64)

    def shard(self, num_shards: int, index: int, contiguous: bool) -> np.ndarray:
        """Return the rows of one of ``num_shards`` contiguous blocks of nearly equal size."""
        assert contiguous
        size, larger = divmod(self.num_rows, num_shards)  # the first `larger` shards have one row more
        start = index * size + min(index, larger)
        return np.arange(start, start + size + (index < larger))


def iid(labels: np.ndarray, *, num_clients: int) -> list[np.ndarray]:
    """Return the rows of each client by `IidPartitioner`: contiguous blocks of equal size."""
    return _load_all(_iid.IidPartitioner(num_clients), labels)


def class_shards(labels: np.ndarray, *, num_shards: int) -> list[np.ndarray]:
    """Return the rows of each shard by `PathologicalPartitioner`: one class per shard, assigned in turn."""
    partitioner = _pathological.PathologicalPartitioner(
        num_shards, "label", num_classes_per_partition=1, class_assignment_mode="deterministic", shuffle=False
    )
    return _load_all(partitioner, labels)


def _load_all(partitioner: Any, labels: np.ndarray) -> list[np.ndarray]:
    partitioner.dataset = LabelColumn(labels)
    return [partitioner.load_partition(client) for client in range(partitioner.num_partitions)]


@contextmanager
def _hidden_modules(*packages: str) -> Iterator[None]:
    """Remove the modules of ``packages`` from ``sys.modules`` inside the block; restore them afterwards."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in packages]

    before = {name: sys.modules.pop(name) for name in loaded()}
    try:
        yield
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)


def _load_partitioners() -> list[ModuleType]:
    """Import the modules of two partitioners without running their packages."""
    with _hidden_modules("datasets", "flwr_datasets"):
        sys.modules["datasets"] = ModuleType("datasets")
        vars(sys.modules["datasets"])["Dataset"] = LabelColumn
        for package in ("flwr_datasets", "flwr_datasets.partitioner"):
            specification = find_spec(package)
            assert specification is not None
            sys.modules[package] = module_from_spec(specification)
        names = ("iid_partitioner", "pathological_partitioner")
        return [import_module(f"flwr_datasets.partitioner.{name}") for name in names]


_iid, _pathological = _load_partitioners()
