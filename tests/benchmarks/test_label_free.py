"""The table of correlations over all runs of some folders."""

import sys

from benchmarks import label_free
from tests.fedssl.runs.test_reliability import make


def test_each_result_has_its_correlation(tmp_path, monkeypatch, capsys):
    make(tmp_path, {"effective_rank": [5, 1, 3, 2, 4], "alpha_req": [1, 1, 1, 1, 1]}, [0.9, 0.5, 0.7, 0.6, 0.8])
    monkeypatch.setattr(sys, "argv", ["label_free.py", str(tmp_path)])
    label_free.main()
    _, _, _, runs, seeds, *others = f"\n{capsys.readouterr().out}".splitlines()
    assert runs.split(" | ")[1:] == ["1.00 (95% interval 1.00 to 1.00) over 5 runs", "- (5 runs)", "- (0 runs) |"]
    assert seeds.split(" | ")[1:] == runs.split(" | ")[1:]
    assert [line.split(" | ")[0] for line in others if line.startswith("|")] == ["| dataset digits", "| method simclr"]
