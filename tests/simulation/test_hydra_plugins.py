"""Hydra's launchers and its Optuna sweeper give the results of a sequential sweep. Missing packages skip their tests.

They are installed by ``uv sync --group launchers``; hydra-ray-launcher, which needs an older cloudpickle, by pip.
"""

import csv
from importlib.util import find_spec

import pytest

from tests.simulation.test_sweep import encoders, sequential, sweep  # noqa: F401, a fixture

LAUNCHERS = {"joblib": ("hydra_joblib_launcher", ["hydra.launcher.n_jobs=2"])}
LAUNCHERS |= {"submitit_local": ("hydra_submitit_launcher", []), "ray": ("hydra_ray_launcher", [])}

pytestmark = pytest.mark.heavy


def require(package):
    if find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{package}") is None:
        pytest.skip(f"{package} is not installed")


def _rows(folder):
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_gives_the_results_of_a_sequential_sweep(sequential, tmp_path, name):  # noqa: F811, the fixture
    """Two of the four jobs are invalid. The others run, and the exit status is 1."""
    package, options = LAUNCHERS[name]
    require(package)
    jobs = ["seed=0,1", "clients_per_round=2,9", "engine=local", "hydra.sweep.dir=sweep"]
    status, output = sweep(tmp_path, *jobs, f"hydra/launcher={name}", *options)
    assert status == 1, output
    assert "clients_per_round=9 is more than num_clients=3" in output
    assert encoders(tmp_path / "sweep") == encoders(sequential)
    assert _rows(tmp_path / "sweep") == _rows(sequential)


@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]])
def test_optuna_receives_the_metric_of_every_job(tmp_path, launcher):
    require("hydra_optuna_sweeper")
    if launcher:
        require("hydra_joblib_launcher")
    options = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=6"]
    options += ["hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=0", "sweep.metric=rankme"]
    measured = ["evaluate_every=1", "collapse_images=64", "engine=local"]
    status, output = sweep(
        tmp_path, *options, *launcher, *measured, "optimizer.lr=interval(0.0001,1)", "hydra.sweep.dir=sweep"
    )
    assert status == 0, output
    rows = _rows(tmp_path / "sweep")
    assert len(rows) == 6
    best = max(rows, key=lambda row: float(row["rankme_mean"]))
    written = (tmp_path / "sweep/optimization_results.yaml").read_text()
    assert f"best_value: {float(best['rankme_mean'])}" in written
    assert best["optimizer.lr"] in written
