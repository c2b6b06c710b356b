"""Memory: what the system says there is."""

import mmap

from fedssl.machine import memory
from fedssl.machine.memory import available_memory, gigabytes


def test_no_more_than_a_container_may_have(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_LIMIT", tmp_path / "memory.max")
    free = available_memory()
    assert free > 10**6
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 10**6
    (tmp_path / "memory.max").write_text("1048576\n")
    assert available_memory() == 2**20


def test_in_words():
    assert [gigabytes(number) for number in (12_288_000_000, 100_000_000, 1_500_000)] == ["12.3 GB", "0.1 GB", "1.5 MB"]


def test_memory_that_the_process_has_kept_is_available(monkeypatch, tmp_path):
    """The limit of a container is one of all memory, to which nothing is added."""
    monkeypatch.setattr(memory, "_LIMIT", tmp_path / "none")
    assert available_memory(reusable=2**50) > 2**50
    (tmp_path / "none").write_text("1000")
    assert available_memory(reusable=2**50) == 1000
    memory._first_private_memory.cache_clear()
    before = memory.grown_memory()
    with mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        for page in range(0, 2**26, mmap.PAGESIZE):
            kept[page] = 1
        assert memory.grown_memory() - before > 2**25
