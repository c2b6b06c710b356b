"""Every script in benchmarks/ has a help text."""

import os
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import benchmarks.fedssl_bench

FILES = Path(benchmarks.fedssl_bench.__file__).parents[1].glob("*.py")
SCRIPTS = sorted(script for script in FILES if '__name__ == "__main__"' in script.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with patch.dict(os.environ), pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    assert "--help" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["evaluation", "x.pt", "x"], ["label_free", "x"], ["label_next", "dataset=digits"]]
)
def test_wrong_arguments_are_refused_in_one_sentence(arguments, capsys, monkeypatch, tmp_path):
    name, *rest = arguments
    (script,) = (script for script in SCRIPTS if script.stem == name)
    monkeypatch.setattr(sys, "argv", [str(script), *rest])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"{name}: ")
