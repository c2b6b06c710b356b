"""Updates of a round in memory and in a file: equal bits, little memory, and a full disk."""

import errno
import os

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.wire.messages import ClientUpdate
from strategies.eua import EUAAggregator
from strategies.krum import KrumAggregator
from strategies.robust import Median, TrimmedMean
from strategies.update_store import UpdateStorage

# Layers below, at and above the 8,192 numbers that are next to each other in the file, and of several dtypes.
SHAPES = {"a": (200, 150), "b": (8192,), "c": (3, 5), "bn.running_var": (7,), "d": (8193,), "n": (), "e": (0,)}
DTYPES = {"c": np.float64, "d": np.float16, "n": np.int64}


def models(number, *, seed=0):
    random = np.random.default_rng(seed)
    return [
        {name: np.asarray(random.uniform(1, 9, shape)).astype(DTYPES.get(name, "f4")) for name, shape in SHAPES.items()}
        for _ in range(number)
    ]


def stored(updates, *, in_memory_number=0, folder=None):
    each = sum(array.nbytes for array in updates[0].values())
    store = UpdateStorage(folder, memory=in_memory_number * each).new_store(GlobalLayers(updates[0]))
    for update in updates:
        store.add(update)
    return store


@pytest.mark.parametrize("in_memory_number", [0, 3, 40])
def test_a_store_returns_what_was_added(in_memory_number, tmp_path):
    updates = models(37)  # more than the 32 clients of a block
    store = stored(updates, in_memory_number=in_memory_number, folder=tmp_path)
    assert len(store) == 37
    assert not list(tmp_path.iterdir())  # the file has no name
    for index in (0, 2, 3, 31, 32, 36):
        for name, array in store.layers(index).items():
            np.testing.assert_array_equal(array, updates[index][name], strict=True)
    for step in (1000, 8192, 9000, 20000):
        for chosen in (None, [1, 2, 5, 33, 35, 36]):
            for name in SHAPES:
                tiles = [(tile, np.stack(arrays)) for tile, arrays in store.tiles(name, step, chosen)]
                flat = np.stack([updates[index][name].reshape(-1) for index in chosen or range(37)])
                assert [tile.start for tile, _ in tiles] == list(range(0, flat.shape[1], step))
                for tile, columns in tiles:
                    np.testing.assert_array_equal(columns, flat[:, tile], strict=True)


AGGREGATORS = {
    "eua": EUAAggregator,
    "eua unit": lambda: EUAAggregator(deviation="unit", step="constant"),
    "median": lambda: Median().server.aggregator(1),
    "trimmed_mean": lambda: TrimmedMean(beta=0.2).server.aggregator(1),
    "krum": lambda: KrumAggregator(malicious=1, select=1),
    "multi-krum": lambda: KrumAggregator(malicious=1, select=12),
}


@pytest.mark.parametrize("make", AGGREGATORS.values(), ids=AGGREGATORS.keys())
def test_a_file_changes_no_bit(make, tmp_path):
    start, *updates = models(36)
    reference, results = GlobalLayers(start), []
    for memory in (2**40, 300_000, 0):
        aggregator = make()
        aggregator.storage = UpdateStorage(tmp_path, memory=memory)
        aggregator.start(reference)
        for client, layers in enumerate(updates):
            aggregator.add(ClientUpdate(layers=layers, partition_id=client), reference.cosines_of(layers))
        results.append(aggregator.finish())
    for other in results[1:]:
        assert list(other) == list(start)
        for name, array in results[0].items():
            np.testing.assert_array_equal(other[name], array, strict=True)
    assert any(not np.array_equal(results[0][name], start[name]) for name in start)


def test_stores_of_a_round_share_the_memory(tmp_path):
    storage = UpdateStorage(tmp_path, memory=300)
    one, other = (storage.new_store(GlobalLayers({"w": np.zeros(25, np.float32)})) for _ in range(2))  # 100 bytes each
    for value in range(3):
        one.add({"w": np.full(25, value, np.float32)})
        other.add({"w": np.full(25, -value, np.float32)})
    # The order of adding is one, other, one: three fit.
    assert [len(store._in_memory) for store in (one, other)] == [2, 1]
    assert [store.layers(2)["w"][0] for store in (one, other)] == [2, -2]


def test_a_full_disk_releases_its_space(tmp_path, monkeypatch):
    store = stored(models(2), folder=tmp_path)
    descriptor = store._file._file.fileno()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        store.add(models(1)[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert len(store) == 0


def test_a_write_that_stops_early_is_continued(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:1000], offset))
    updates = models(2)
    store = stored(updates, folder=tmp_path)
    for name, array in store.layers(1).items():
        np.testing.assert_array_equal(array, updates[1][name], strict=True)
