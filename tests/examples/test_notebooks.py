"""The notebooks run from their first cell to the last, on a small scale."""

import asyncio
from pathlib import Path

import pytest

import fedssl

MISSING = "the notebook's tools are not installed: uv sync --group pages"
nbformat = pytest.importorskip("nbformat", reason=MISSING)
nbclient = pytest.importorskip("nbclient", reason=MISSING)
pytest.importorskip("ipykernel", reason=MISSING)

FOLDER = Path(__file__).parents[2] / "examples"
SMALL = {"rounds": 1, "local_epochs": 0, "encoder__width": 2, "measure_resources": False, "collapse_images": 0}
SMALL |= {"threads": 1, "engine": "local", "dataset__limit": 100, "dataset__test_limit": 50, "final_evaluation": "knn"}
PATCH = f"""
import fedssl
run = fedssl.run
fedssl.run = lambda *overrides, **settings: run(*overrides, **(settings | {SMALL}))
"""


def read(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are not stored
    return notebook


def execute(notebook, folder, monkeypatch):
    """Run the cells in this process, inside an event loop as in a notebook, and return their variables."""

    async def cells():
        for cell in notebook.cells:
            magic, _, text = cell.source.partition("\n")
            if cell.cell_type != "code":
                continue
            if magic.startswith("%%writefile "):
                (folder / magic.split()[1]).write_text(text)
            else:
                exec(cell.source, variables)

    def small(*overrides, **settings):
        return original(*overrides, **{**settings, **{key: SMALL[key] for key in SMALL if "resume" not in settings}})

    variables = {}
    original = fedssl.run
    monkeypatch.setattr(fedssl, "run", small)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    asyncio.run(cells())
    pyplot = variables.get("plt")
    if pyplot:
        pyplot.close("all")
    return variables


@pytest.mark.heavy
def test_a_first_run(tmp_path, monkeypatch):
    notebook = read("first_run")
    notebook.cells[-1].source = notebook.cells[-1].source.replace("rounds=10", "rounds=2")
    variables = execute(notebook, tmp_path, monkeypatch)
    assert variables["features"].shape[0] == 1797
    assert variables["run"].metrics.index.tolist() == [1, 2]


@pytest.mark.heavy
def test_images_of_a_folder(tmp_path, monkeypatch, capsys):
    variables = execute(read("your_images"), tmp_path, monkeypatch)
    assert len(variables["embeddings"].names) == 600
    output = capsys.readouterr().out
    assert "fotos" in output  # the sentence of the error
    assert output.count(".png") == 5  # neighbors


@pytest.mark.heavy
def test_a_strategy_of_ones_own(tmp_path, monkeypatch):
    for name, value in {"local_epochs": 1, "rounds": 2}.items():
        monkeypatch.setitem(SMALL, name, value)
    runs = execute(read("your_strategy"), tmp_path, monkeypatch)["runs"]
    assert list(runs) == [0, 0.5, 1, "fedavg"]
    assert runs[0].metrics["model_cosine"].tolist() != runs[1].metrics["model_cosine"].tolist()


@pytest.mark.heavy
def test_progress_is_one_line_that_changes_in_a_kernel(tmp_path):
    notebook = read("first_run")
    del notebook.cells[2:]
    notebook.cells.insert(0, nbformat.v4.new_code_cell(PATCH))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = notebook.cells[2].outputs
    (bar,) = [output for output in outputs if output.output_type == "display_data"]
    assert bar.data["text/html"].startswith('<progress value="1" max="1"></progress> 1/1')
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "results are in" in text
    assert "round 1/1" not in text
    assert "finished, 1 of 1 rounds" in outputs[-1].data["text/plain"]
