"""The largest number of updates that fit into memory and on the disk, by hand, and runs that are rejected."""

import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest

import server_app.update_memory
import strategies.update_store
from fedssl.errors import InputError, RunError
from server_app.update_memory import check_updates_fit, stored_updates
from simulation.run import run
from strategies.base import ServerStrategy
from strategies.clustered import Clustered
from strategies.eua import EUA
from strategies.fedavg import FedAvg
from strategies.krum import Krum
from strategies.robust import Median
from strategies.update_store import CollectingAggregator
from tests.runs import SMALL, UNTESTED, model_bits

MODEL = {"w": np.zeros(250, np.float32)}  # 1,000 bytes


class Quadratic(CollectingAggregator):
    """Aggregator that needs 10 bytes for each pair of updates."""

    required_metrics = ()

    def working_memory(self, layers, number):
        return 10 * number**2


def number(server, *, rounds=3, filters_norms=False, **room):
    return stored_updates(server, MODEL, rounds=rounds, filters_norms=filters_norms).largest_number(**room)


def test_largest_number_by_hand():
    server = ServerStrategy(Quadratic)
    # 5,000 bytes of memory and 20,999 of disk hold 25 updates. 25 need 6,250 bytes to aggregate.
    assert number(server, budget=5_000, available=11_250, disk=20_999) == 25
    # With one byte less there are 6,249, enough for 24: 5,760.
    assert number(server, budget=5_000, available=11_249, disk=20_999) == 24
    assert number(server, budget=5_000, available=6_689, disk=20_999) == 12  # 1,689: 12 need 1,440, and 13 need 1,690
    assert number(server, budget=5_000, available=None, disk=0) == 5
    assert number(server, budget=999, available=10**6, disk=0) == 0
    # A filter of norms stores them once more: 25,999 // 2,000.
    assert number(server, filters_norms=True, budget=5_000, available=10**6, disk=20_999) == 12


def test_strategies_declare_what_they_store():
    def copies(strategy, **options):
        return stored_updates(strategy.server, MODEL, **{"rounds": 3, "filters_norms": False, **options}).copies

    assert [copies(one) for one in (FedAvg(), EUA(), Median(), Krum())] == [0, 1, 1, 1]
    assert copies(FedAvg(), filters_norms=True) == 1
    clustered = Clustered(clusters=2, assign_by="update_cosine", cluster_round=2)
    assert copies(clustered) == 2  # updates and differences
    assert copies(clustered, rounds=1) == 0  # the round of the clusters is not reached


def federation(strategy, folder, **aggregation):
    values = SimpleNamespace(**{"over_selection": 0, "max_norm_ratio": None, **aggregation})
    recording = SimpleNamespace(folder=folder, choices={"strategy": "median"})
    settings = SimpleNamespace(aggregation=values, recording=recording, rounds=3)
    return SimpleNamespace(strategy=strategy, settings=settings, clients_per_round=10, nodes=dict.fromkeys(range(40)))


def test_a_run_that_does_not_fit_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(server_app.update_memory, "memory_budget", lambda: 2_000)
    monkeypatch.setattr(server_app.update_memory, "available_memory", lambda: 10**12)
    monkeypatch.setattr(server_app.update_memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))

    def check(strategy, **aggregation):
        folder = tmp_path / "not" / "yet"
        check_updates_fit(federation(strategy, folder, **aggregation), MODEL)

    # 2,000 bytes and nine tenths of 10,000 hold 11 updates.
    check(Median())
    check(Median(), over_selection=1)
    check(FedAvg(), over_selection=30)
    with pytest.raises(InputError, match=r"^strategy=median stores .* 12 of them need .*set clients_per_round=9, or"):
        check(Median(), over_selection=2)
    with pytest.raises(InputError, match=r"^aggregation.max_norm_ratio stores .*aggregation.max_norm_ratio=null"):
        check(FedAvg(), over_selection=2, max_norm_ratio=3.0)


WORDS = [*SMALL, *UNTESTED, "num_clients=3", "rounds=2", "dataset.limit=36", "engine=local"]
KINDS = {"eua": ["strategy=eua"], "filtered": ["strategy=median", "aggregation.max_norm_ratio=100"]}
KINDS["clusters"] = ["strategy=clustered", "strategy.assign_by=update_cosine"]


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=x, marks=[] if x == "clusters" else pytest.mark.heavy) for x, words in KINDS.items()],
)
def test_a_run_with_a_file_survives_a_full_disk(words, tmp_path, monkeypatch):
    run([*WORDS, *words, f"output_dir={tmp_path / 'memory'}"])
    monkeypatch.setattr(strategies.update_store, "memory_budget", lambda: 0)
    write, written = os.pwrite, []

    def write_until_full(file, data, offset):
        written.append(offset)
        if len(written) == full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, offset)

    full_at = -1
    monkeypatch.setattr(os, "pwrite", write_until_full)
    run([*WORDS, *words, f"output_dir={tmp_path / 'file'}"])
    expected = model_bits(tmp_path / "memory")
    assert model_bits(tmp_path / "file") == expected

    full_at, folder = len(written) - 1, tmp_path / "full"  # near the end of the last round that writes
    assert full_at > 1
    written.clear()
    with pytest.raises(RunError, match=r"No space left on device.* then continue with fedssl resume="):
        run([*WORDS, *words, f"output_dir={folder}"])
    full_at = -1
    run([f"resume={folder}"])
    assert model_bits(folder) == expected


def test_a_run_is_rejected_before_its_first_round(tmp_path, monkeypatch):
    monkeypatch.setattr(server_app.update_memory, "memory_budget", lambda: 0)
    monkeypatch.setattr(server_app.update_memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="strategy=eua stores the updates of a round, and 3 of them need"):
        run([*WORDS, "strategy=eua", f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("strategy", [EUA(), Median(), Krum()])
def test_working_memory_grows_with_the_number(strategy):
    memory = strategy.server.aggregator(1).working_memory
    assert 0 < memory(MODEL, 10) < memory(MODEL, 10**6)
