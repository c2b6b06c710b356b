"""The check of a GPU, on the CPU and with tiny problems."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import gpu, gpu_checkpoint
from benchmarks.gpu_wheels import BUILT, WHEELS, pinned
from strategies.types import GLOBAL, GlobalModel, ServerState

# Not among the wheels, nor in the image for which they are gathered.
MISSING = ["ray", "datasets", "flwr_datasets", "fastapi", "uvicorn", "sqlalchemy", "alembic", "tomli_w", "lightly"]
NEED_CUDA = ("triton", "compile")


def check(output: Path, *arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    """Return the exit status and the results of the command, in a Python without the missing packages."""
    output.mkdir()
    (output / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING}))\n")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--output", str(output)]
    root = Path(gpu.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{output}:{root}", "HF_HUB_OFFLINE": "1"}
    status = subprocess.run([*command, *arguments], cwd=root, env=environment, timeout=400).returncode
    return status, json.loads((output / "gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.heavy
def test_every_part_runs_and_learning_continues(tmp_path):
    status, results = check(tmp_path / "first")
    assert status == 0, (tmp_path / "first" / "gpu.log").read_text()
    assert list(results) == ["a", "b", "c", "d"]
    cases = {case: result for part in results.values() for case, result in part.items()}
    unavailable = {case for case, result in cases.items() if isinstance(result, dict) and "unavailable" in result}
    assert unavailable == {case for case in cases if case.split(", ")[-1] in NEED_CUDA}
    assert not any(isinstance(result, dict) and "skipped" in result for result in cases.values())
    assert all(results["a"][name]["relative error"] == 0 for name in gpu.CORRECTNESS)
    assert results["a"]["a step of simclr, eager"]["operations"] > 100
    assert {type(results["b"][case]) for case in results["b"].keys() - unavailable - {"end"}} == {float}
    assert results["c"].keys() == {"1 processes", "2 processes", "end", "seconds"}
    for strategy in gpu.STRATEGIES:
        assert results["d"][f"{strategy}, 2 rounds"]["round"] == 2
        assert 0.1 < results["d"][f"{strategy}, linear probe after 2 rounds"]["linear"] <= 1
    status, results = check(tmp_path / "second", "--parts", "d", "--continue", str(tmp_path / "first" / "checkpoint.0"))
    assert status == 0
    assert {result["round"] for case, result in results["d"].items() if case.endswith(", 4 rounds")} == {4}


@pytest.mark.heavy
@pytest.mark.slow
def test_a_part_with_an_error_fails(tmp_path):
    status, results = check(tmp_path / "run", "--parts", "d", "--continue", str(tmp_path / "checkpoint.0"))
    assert status == 1
    assert "failed" in results["d"]["end"]


def test_a_part_without_time_is_stopped(tmp_path):
    results = gpu.Results(tmp_path)
    options = gpu.Options(device="cpu", small=True, output=tmp_path, data=None, checkpoint=None, strategies=())
    gpu.supervise("c", options, results, end=0.0)  # of a clock that started before
    assert results.failed
    assert results.values["c"].keys() == {"end", "seconds"}


def test_checkpoints_in_parts_have_half_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checkpoint, "MAX_PART", 100)
    layers = {"weight": np.linspace(-1, 1, 400, dtype=np.float32), "num_batches_tracked": np.array(7)}
    state = ServerState(round=3, models={GLOBAL: GlobalModel(layers=layers)})
    gpu_checkpoint.save({"fedavg": SimpleNamespace(state=state)}, tmp_path)
    assert len(list(tmp_path.iterdir())) > 10  # in which 10 follows 9
    run = SimpleNamespace(state=ServerState())
    gpu_checkpoint.load({"fedavg": run}, tmp_path / "checkpoint.0")
    loaded = run.state.models[GLOBAL].layers
    assert run.state.round == 3
    assert [(name, x.dtype) for name, x in loaded.items()] == [(name, x.dtype) for name, x in layers.items()]
    np.testing.assert_allclose(loaded["weight"], layers["weight"], rtol=2**-11)
    assert loaded["num_batches_tracked"] == 7


def test_packages_of_the_wheels_are_installed():
    assert len(pinned([*WHEELS, *BUILT])) == 20
