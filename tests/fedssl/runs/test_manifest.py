"""The files of lines of a run, which are cut after the lines of a round."""

import os
from pathlib import Path

from fedssl.runs.manifest import LineFile, digest_of


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
