import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.cli import main

MISSING = "the notebook's tools are not installed: uv sync --group pages"
nbformat = pytest.importorskip("nbformat", reason=MISSING)
nbclient = pytest.importorskip("nbclient", reason=MISSING)
pytest.importorskip("ipykernel", reason=MISSING)

FILE = Path(__file__).parents[2] / "examples" / "neighbors.ipynb"


@pytest.fixture
def notebook():
    """The notebook with one short round."""
    notebook = nbformat.read(FILE, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are not stored
    command = next(cell for cell in notebook.cells if "experiment=digits_methods" in cell.source)
    command.source = command.source.replace("evaluate_every=0", 'rounds=1", "local_epochs=1')
    return notebook


@pytest.mark.heavy
def test_all_cells_run(notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def run(command: list[str], **options: bool) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", command)
        assert main() == 0
        return subprocess.CompletedProcess(command, 0, stdout=capsys.readouterr().out)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    variables: dict[str, object] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(cell.source, variables)
    variables["plt"].close("all")
    output = capsys.readouterr().out
    assert "federated" in output
    assert "pixels" in output
    assert (tmp_path / "run" / "encoder.pt").exists()


@pytest.mark.heavy
def test_the_notebook_runs_in_jupyter(notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    output = notebook.cells[-1].outputs[0].text
    assert "federated" in output
    assert "pixels" in output
