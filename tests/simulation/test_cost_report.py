"""The output of ``plan=true`` for a run and for a sweep."""

from dataclasses import replace

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError
from simulation import cli, cost_report
from simulation.cost import compose_cost
from simulation.cost_report import concurrent_jobs, format_cost
from simulation.parallel_jobs import JobTask
from simulation.resources import EngineChoice
from tests.planning import QUICK, build
from tests.simulation.test_cost import MEASURED


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement; return the batch sizes of the measured runs."""
    batch_sizes = []

    def measure(components, **kwargs):
        batch_sizes.append(components.settings.training.batch_size)
        return MEASURED

    monkeypatch.setattr("simulation.cost.measure", measure)
    return batch_sizes


def command(monkeypatch, *overrides):
    monkeypatch.setattr("sys.argv", ["fedssl", *overrides])
    return cli._run_all()


def test_the_report_by_hand(tmp_path):
    components = build([*QUICK, "partition=iid", "batch_size=8", "rounds=2"], tmp_path)
    cost = compose_cost(components, MEASURED, EngineChoice("ray", 2, ""), build=1.0)
    down, up = (sum(getattr(counts, name) for counts in cost.rounds) for name in ("bytes_down", "bytes_up"))
    assert format_cost(cost, startup=2.0).splitlines() == [
        "engine    ray, 2 clients at once",
        "rounds    2, each with 3 of 5 clients",
        "steps     9 per round, 18 in total",
        f"download  {down / 6:,.0f} bytes per client and round, {down:,} in total",
        f"upload    {up / 6:,.0f} bytes per client and round, {up:,} in total",
        "memory    0.0 MB: server 0.0 MB, 2 workers with 0.0 MB each",
        "time      1.9 s per round, 33 s in total",  # 2 + 1 + 2 * (2 * 0.75 + 0.375) + 15 + 11
    ]
    text = format_cost(replace(cost, round_seconds=[1000.0, 1200.0], notes=["bytes are less"]), startup=2.0)
    assert "18 min per round," in text
    assert text.endswith("\nnote      bytes are less")


def test_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("simulation.cost.MAX_STEPS", 2)
    assert command(monkeypatch, *QUICK, "plan=true") == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["engine", "rounds", "steps", "download", "upload", "memory", "time"]
    assert [line.split()[0] for line in lines] == names
    assert not list(tmp_path.iterdir())


def test_jobs_that_cost_the_same_share_a_row(tmp_path, monkeypatch, capsys, measured):
    """Jobs of a row differ by learning rates and seeds."""
    monkeypatch.chdir(tmp_path)
    swept = ["optimizer.lr=0.1,0.2", "seed=0,1", "batch_size=8,16", "clients_per_round=2,9"]
    assert command(monkeypatch, "-m", *QUICK, "plan=true", *swept, "sweep.jobs=1") == 2
    header, *rows, _, total = (output := capsys.readouterr().out).splitlines()[:5]
    assert header.split() == ["jobs", "settings", "steps", "bytes", "memory", "time"]
    assert measured == [8, 16]
    expected = [["clients_per_round=2", f"batch_size={size}"] for size in (8, 16)]
    assert [row.split("  ")[1].split() for row in rows] == expected
    # Eight jobs of 4 rounds: 2 * 0.125 and steps, and three final evaluations of 5 s.
    assert total.startswith("8 jobs, 1 at once, ")
    assert "\nnote: the numbers of a row are those of its first job, and depend on the seed\n" in output
    assert output.count("is rejected: clients_per_round=9 is more than num_clients=5") == 8
    assert not list(tmp_path.iterdir())


def test_jobs_of_other_passes_have_rows(tmp_path, monkeypatch, capsys, measured):
    """A step of SAM takes two passes, or one with rho=0. No row has several jobs."""
    monkeypatch.chdir(tmp_path)
    swept = ["optimizer=sam", "optimizer.rho=0.0,0.05", "strategy=euc", "sweep.jobs=1"]
    assert command(monkeypatch, "-m", *QUICK, "plan=true", *swept) == 0
    _, *rows, _, _, note = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows] == ["optimizer.rho=0.0", "optimizer.rho=0.05"]
    assert note.startswith("note: bytes are those of whole models: strategy=euc sends fewer layers")


CASES = [(8, None, None, 3), (8, 10e9, None, 2), (5, None, None, 2), (9, None, 1, 1)]


@pytest.mark.parametrize(("cores", "memory", "limit", "expected"), CASES)
def test_concurrent_jobs_need_cores_and_memory(monkeypatch, cores, memory, limit, expected):
    """Three jobs with two cores and 3 GB each; Ray has 70% of 10 GB."""
    monkeypatch.setattr(cost_report, "available_cores", lambda: cores)
    monkeypatch.setattr(cost_report, "available_memory", lambda: memory)
    tasks = [JobTask(None, 2, 0, 3 * 10**9)] * 3
    assert concurrent_jobs(tasks, limit=limit) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan=3"], "plan=3 must be plan=true or plan=false"),
        (["-m", "plan=true,false"], "must be plan=true or plan=false"),
        (["plan=true", "--info"], "cannot estimate what Hydra's sweepers, launchers and flags run"),
        (["-m", "plan=true", "hydra/launcher=joblib"], "cannot estimate what Hydra's sweepers"),
        (["-m", "plan=true", "resume=x", "seed=0,1"], "plan=true estimates a new sweep; leave out resume"),
        (["-m", "plan=true", "seed=0,1", "sweep.address=auto"], "on this machine; leave out sweep.address"),
        (["plan=true", "seed=0,1"], "seed=0,1 sweeps over values; add -m"),
    ],
)
def test_bad_input(monkeypatch, overrides, message):
    with pytest.raises(InputError, match=message):
        command(monkeypatch, *overrides)


def test_plan_is_an_option_of_the_command_only():
    with pytest.raises(InputError, match="plan=true is for the command fedssl, which then runs nothing"):
        compose(["plan=true"])
