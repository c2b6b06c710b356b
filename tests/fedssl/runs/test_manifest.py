"""The files of lines of a run, which are cut after the lines of a round."""

import os
from pathlib import Path

import pytest

from fedssl.atomic_files import saved_rounds
from fedssl.runs.manifest import ClientStateParts, LineFile, client_folder, digest_of


def test_a_file_of_any_size_is_continued(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "clients.jsonl")
    lines.append([{"round": 1}])
    lines.end_round(1)
    kept = lines.part(1)
    os.truncate(lines.file, 2**31)  # of later rounds, without using the disk
    resumed = LineFile(lines.file)
    resumed.restore(kept.size, round=1)
    assert resumed.part(1) == kept
    assert lines.file.read_text() == '{"round": 1}\n'
    resumed.append([{"round": 2}])
    resumed.end_round(2)
    assert resumed.part(2).digest == digest_of(lines.file)
    resumed.restore(0, round=0)
    assert not lines.file.exists()


def test_a_checkpoint_lists_only_folders_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, listed = tmp_path / "clients", []
    folders = [client_folder(states, client) for client in (0, 1, 1000)]

    def save(folder: Path, round: int, modified: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"round-{round:06d}.safetensors").write_bytes(bytes([round]))
        for each in (folder, folder.parent):
            os.utime(each, (modified, modified))

    def listing(folder: Path, suffix: str) -> list[int]:
        listed.append(folder)
        return saved_rounds(folder, suffix)

    monkeypatch.setattr("fedssl.runs.manifest.saved_rounds", listing)
    for folder in folders:
        save(folder, 1, modified=1000)
    os.utime(states, (1000, 1000))
    parts = ClientStateParts(tmp_path)
    first = parts.up_to(1)
    assert [part.path for part in first] == [
        f"clients/{name}/round-000001.safetensors" for name in ("0000/0", "0000/1", "0001/1000")
    ]
    assert sorted(listed) == sorted([states, states / "0000", states / "0001", *folders])
    listed.clear()
    assert (parts.up_to(1), listed) == (first, [])
    save(folders[1] / "frozen", 2, modified=2000)
    second = parts.up_to(2)
    assert {part.path for part in second} - {part.path for part in first} == {
        "clients/0000/1/frozen/round-000002.safetensors"
    }
    assert sorted(set(listed)) == [folders[1], folders[1] / "frozen"]
    (folders[2] / "round-000001.safetensors").unlink()
    folders[2].rmdir()
    assert len(parts.up_to(2)) == len(second) - 1
