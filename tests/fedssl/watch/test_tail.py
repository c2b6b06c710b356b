"""Reading of lines while they are written: half lines, resumptions, damage, and sizes."""

import json
from pathlib import Path

import pytest

from fedssl.watch import live_run
from fedssl.watch.live_run import Tail


def lines(*rounds: int) -> str:
    return "".join(json.dumps({"round": round}) + "\n" for round in rounds)


def rounds(found: tuple[bool, list[dict[str, int]]]) -> tuple[bool, list[int]]:
    void, values = found
    return void, [value["round"] for value in values]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_only_new_and_complete_lines_are_read(file: Path):
    reader = Tail(file)
    assert rounds(reader.read()) == (False, [])  # the file does not exist yet
    file.write_text(lines(1, 2) + '{"rou')
    assert rounds(reader.read()) == (False, [1, 2])
    assert rounds(reader.read()) == (False, [])
    file.write_text(lines(1, 2, 3))
    assert rounds(reader.read()) == (False, [3])
    assert reader.unreadable == 0


@pytest.mark.parametrize("later", [(1,), (1, 7, 8), (1, 7, 8, 9, 10)])  # shorter, as long, and longer than before
def test_a_resumed_run_is_read_from_its_start(file: Path, later: tuple[int, ...]):
    reader = Tail(file)
    file.write_text(lines(1, 2, 3))
    reader.read()
    file.write_text(lines(*later))
    assert rounds(reader.read()) == (True, [*later])
    file.unlink()
    assert rounds(reader.read()) == (True, [])
    assert rounds(reader.read()) == (False, [])


def test_damaged_lines_are_counted_and_left_out(file: Path):
    file.write_bytes(lines(1).encode() + b'{"round": \n[1]\n\xff\x00\n' + b"[" * 100_000 + b"\n" + lines(2).encode())
    reader = Tail(file)
    assert rounds(reader.read()) == (False, [1, 2])
    assert reader.unreadable == 4


def test_large_files_are_read_from_their_last_part(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_run, "CHUNK", 40)  # a line has 13 characters
    file.write_text(lines(*range(1, 10)))
    reader = Tail(file, max_bytes=60)
    assert rounds(reader.read()) == (False, [6, 7, 8])
    assert rounds(reader.read()) == (False, [9])
    assert reader.is_cut
    with file.open("a") as stream:
        stream.write("x" * 100 + "\n" + lines(10, 11))
    assert [round for _ in range(5) for round in rounds(reader.read())[1]] == [10, 11]  # a line longer than a part
    assert not Tail(file, max_bytes=1000).is_cut


def test_what_is_no_regular_file_is_not_read(file: Path):
    file.mkdir()
    assert Tail(file).read() == (False, [])
