"""Memory: what the system says there is."""

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
