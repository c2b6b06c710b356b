"""examples/plugin: the commands of its README with small settings, in a copy of the folder."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
SMALL = ["num_clients=4", "rounds=2", "local_epochs=1", "dataset.limit=60", "threads=1"]
SMALL += ["evaluate_every=1", "collapse_images=0"]


def commands() -> list[list[str]]:
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", (EXAMPLE / "README.md").read_text(), flags=re.M | re.S)
    return [shlex.split(line)[1:] for language, block in blocks if not language for line in block.splitlines()]


def call(entry: str, *overrides: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # -P: the current folder is not on Python's path, as for an installed command.
    code = f"import sys; from {entry} import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", code, *overrides]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def fedssl(*overrides: str, folder: Path) -> str:
    ran = call("simulation.cli", *overrides, folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def fedssl_in_process(*overrides: str, folder: Path, status: int = 0) -> None:
    """Run the command in this process, which does not import the package before and removes it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [entry for entry in sys.path if entry])
        patch.setattr(sys, "argv", ["fedssl", *overrides])
        try:
            assert main() == status
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
                del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the example in another folder."""
    copy = tmp_path_factory.mktemp("example") / "plugin"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "runs", "multirun"))
    return copy


@pytest.fixture(scope="module")
def run_folder(folder):
    fedssl_in_process(*commands()[0], *SMALL, "output_dir=run", folder=folder)
    return folder / "run"


def summary(run_folder):
    return json.loads((run_folder / "summary.json").read_text())


def test_all_components_work_together(run_folder):
    found = summary(run_folder)
    assert (found["status"], found["rounds"]) == ("finished", 2)
    assert set(found["final"]["federated"]) == {"nearest_mean", "nearest_mean_std"}
    assert {file.name for file in run_folder.glob("encoder*.pt")} == {"encoder-even.pt", "encoder-odd.pt"}
    sizes = [int(row.split(",")[1]) for row in (run_folder / "partition.csv").read_text().splitlines()[1:]]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.heavy
def test_it_resumes_with_the_flag(run_folder, folder):
    shutil.copytree(run_folder, folder / "longer")
    fedssl_in_process("--config-dir", "conf", "resume=longer", "rounds=3", folder=folder)
    assert summary(folder / "longer")["rounds"] == 3


@pytest.mark.heavy
def test_the_other_commands(folder):
    _, mixed, sweep, shown, evaluate = commands()
    small = [*SMALL, "encoder.width=4", "rounds=1", "final_evaluation=none"]
    fedssl(*mixed, *small, "output_dir=mixed", folder=folder)
    printed = fedssl(*sweep, *small, "hydra.sweep.dir=sweep", folder=folder)
    assert re.search(r"two_teams .*\n.*fedavg ", printed)
    printed = fedssl(*shown, folder=folder)
    assert "_target_: mylab.strategy.TwoTeams" in printed
    assert evaluate[0] == "--config-dir"


@pytest.mark.heavy
def test_the_encoder_is_evaluated_with_its_config_folder(run_folder, folder):
    overrides = [word.replace("RUN", str(run_folder)) for word in commands()[-1]]
    evaluated = call("fedssl.evaluation.cli", *overrides, folder=folder)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "nearest_mean" in evaluated.stdout
    refused = call("fedssl.evaluation.cli", f"encoder={run_folder}/encoder-even.pt", "dataset=digits", folder=folder)
    assert refused.returncode == 2
    assert "mylab.encoder.Perceptron, which is not part of fedssl" in refused.stderr


@pytest.mark.heavy
def test_python_plots_its_models(folder):
    options = [*SMALL, "encoder=perceptron", "dataset=digits", "snapshot_every=1", "output_dir=plotted"]
    code = f"import fedssl; run = fedssl.run(*{options}, config_dir='conf'); print(*run.plot('cka_layers'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", code]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "cka_layers"), ran.stderr


@pytest.mark.heavy
def test_a_missing_package_is_reported_in_one_sentence(folder, tmp_path, capsys):
    fedssl_in_process("--config-dir", str(folder / "conf"), "strategy=two_teams", folder=tmp_path, status=2)
    errors = capsys.readouterr().err
    assert re.fullmatch(r"fedssl: strategy._target_=mylab.* there is no module mylab; install .*\n", errors)
    assert list(tmp_path.iterdir()) == []
