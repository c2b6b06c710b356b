"""Lines of the files of a run folder."""

import os

from fedssl.runs.jsonl import incomplete_files
from fedssl.safe_io import MAX_LINES_BYTES


def test_lines_of_a_file_larger_than_the_memory_are_counted(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "clients": 2}\n')
    with (tmp_path / "clients.jsonl").open("wb") as stream:
        stream.write(b"{}\n{}")
        stream.truncate(MAX_LINES_BYTES + 1)  # sparse
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\n")
    assert incomplete_files(tmp_path, rounds=1) == []
