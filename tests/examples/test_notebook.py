import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "neighbors.ipynb"


def test_the_notebook_runs_from_the_first_cell_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # what a machine found is not kept
    command = next(cell for cell in notebook.cells if "experiment=digits_methods" in cell.source)
    command.source = command.source.replace("evaluate_every=0", 'rounds=1", "local_epochs=1')
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    output = notebook.cells[-1].outputs[0].text
    assert "federated" in output
    assert "pixels" in output
    assert (tmp_path / "run" / "encoder.pt").exists()
