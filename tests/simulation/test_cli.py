"""The command ``fedssl``: its settings, and runs to resume."""

import shlex
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

import simulation.run
from fedssl.config.literal import literal_values
from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from fedssl.config.saved_run import save_run
from fedssl.config.targets import searchpath_override
from fedssl.errors import InputError
from fedssl.runs.run import read_run
from simulation import cli
from simulation.sweep_state import STATE_FILE
from tests.devices import write_images
from tests.runs import KNN, SMALL
from tests.simulation.test_run import QUICK


@pytest.mark.parametrize(
    ("choices", "override"),
    [
        (["dataset=cifar10"], "dataset.cache=/x"),
        (["engine=ray"], "engine.address=10.0.0.1:6379"),
        (["tracker=mlflow"], "tracker.uri=http://10.0.0.1:5000"),
    ],
)
def test_settings_outside_a_run_folder_are_repeated(choices, override, tmp_path, monkeypatch, capsys):
    save_run(compose([*choices, override]).recording, tmp_path)
    ran = []
    built = SimpleNamespace(in_folder=lambda folder, paths: None)
    monkeypatch.setattr(simulation.run, "_build", lambda settings: ran.append(settings.recording.config) or built)
    monkeypatch.setattr(simulation.run, "_run_here", lambda run: None)

    def command(*overrides):
        monkeypatch.setattr("sys.argv", ["fedssl", f"resume={tmp_path}", *overrides])
        return cli.main(), capsys.readouterr().err

    status, error = command()
    assert status == 2
    assert "accepted only from your own command, because" in error
    assert "if you trust it, add the override there" in error
    assert command(override) == (0, "")
    key, _, value = override.partition("=")
    assert OmegaConf.select(ran.pop(), key) == value
    status, error = command(override, "rouns=5")
    assert (status, not ran) == (2, True)
    assert error.startswith("fedssl: there is no setting 'rouns'; did you mean rounds;")


def test_the_command_that_continues_a_run_can_be_typed(tmp_path, monkeypatch, capsys):
    def command(*words):
        monkeypatch.setattr("sys.argv", ["fedssl", *words])
        return cli.main(), capsys.readouterr().err

    folder = tmp_path / "it's, a {run}"
    words = [*QUICK, "rounds=1", "engine=local", f"output_dir={folder}"]
    assert command(*words)[0] == 0
    status, error = command(*words)
    assert status == 2
    name, *remedy = shlex.split(error.partition("continue that run: ")[2])
    assert (name, command(*remedy)) == ("fedssl", (0, ""))


def test_a_missing_split_is_refused_before_the_run_folder(tmp_path, monkeypatch, capsys):
    for folder in ("Training/a", "Training/b", "Testing/a", "Testing/b"):
        write_images(tmp_path / "images" / folder, 4)

    def command(split, *overrides):
        words = [*QUICK, "num_clients=2", "rounds=1", "engine=local", "dataset=folder", "dataset.size=8"]
        words += [f"dataset.path={tmp_path / 'images'}", f"output_dir={tmp_path / 'run'}", "final_evaluation=knn"]
        monkeypatch.setattr("sys.argv", ["fedssl", *words, f"dataset.splits.test={split}", *overrides])
        return cli.main(), capsys.readouterr().err

    status, error = command("val")
    assert (status, (tmp_path / "run").exists()) == (2, False)
    assert "images has no split 'val', only Testing, Training; name one of them in dataset.splits" in error
    assert command("Testing")[0] == 0
    assert (tmp_path / "run" / "encoder.pt").exists()


def test_a_sequential_sweep_stops_with_the_command_that_resumes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def stop(overrides):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", stop)
    words = ["rounds=1", "seed=0,1", "hydra.sweep.dir='a, b'", "sweep.jobs=1"]
    with pytest.raises(KeyboardInterrupt, match="; continue with: fedssl -m 'hydra") as stopped:
        cli._run_sweep([searchpath_override([tmp_path]), *QUICK, *words])
    assert yaml.safe_load((tmp_path / "a, b" / STATE_FILE).read_text())["jobs"].keys() == {"0", "1"}
    with pytest.raises(InputError, match="hydra.sweep.dir=b but resume=.* continues in its folder; leave out hydra"):
        cli._run_sweep(["resume='a, b'", "hydra.sweep.dir=b"])
    with pytest.raises(InputError, match="resume='a, b' is the folder of a sweep; add -m"):
        cli._run_single(["resume='a, b'"])
    monkeypatch.setattr(cli, "run", simulation.run.run)
    command = shlex.split(str(stopped.value).partition("continue with: ")[2])
    assert cli._run_sweep([*literal_values(command[2:], sweep=True), "sweep.jobs=1"]) == 0
    assert len(list((tmp_path / "a, b").glob("*/encoder.pt"))) == 2


def test_jobs_resume_with_what_only_a_command_may_give(tmp_path, monkeypatch, capsys):
    (tmp_path / "own" / "strategy").mkdir(parents=True)
    (tmp_path / "own" / "strategy" / "mine.yaml").write_text((CONF / "strategy" / "fedavg.yaml").read_text())

    def stop_in_the_second_wave(overrides):
        if any(word.startswith("resume=") for word in overrides):
            raise KeyboardInterrupt
        simulation.run.run(overrides)

    def command(*words, run=simulation.run.run):
        monkeypatch.setattr(cli, "run", run)
        monkeypatch.setattr("sys.argv", ["fedssl", "-m", *words, "sweep.jobs=1"])
        return cli.main(), capsys.readouterr().err

    folder, axis = tmp_path / "sweep", 'sweep.axes={epochs:["local_epochs=${num_clients}"]}'
    outside = ["--config-dir", str(tmp_path / "own"), "clients_per_round=${num_clients}", axis]
    words = [*SMALL, *KNN, "rounds=2", "strategy=mine", "sweep.metric=knn", "sweep.reduction_factor=2"]
    status, error = command(*words, *outside, f"hydra.sweep.dir={folder}", run=stop_in_the_second_wave)
    assert status == 130, error
    for given in (outside[:3], [*outside[:2], axis], outside[2:]):
        status, error = command(*given, f"resume={folder}")
        assert (status, "accepted only from your own command, because" in error) == (2, True)
    status, error = command(*outside, f"resume={folder}", run=stop_in_the_second_wave)
    assert status == 130, error
    hint = shlex.split(error.partition("continue with: ")[2])
    assert command(*hint[2:]) == (0, "")
    assert sorted(read_run(folder / number).state for number in "01") == ["finished", "pruned"]


def test_a_sweep_without_a_valid_job_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, reason in ((["rounds=0,-1"], "rounds=0 must be an integer"), (["seed="], "seed=")):
        monkeypatch.setattr("sys.argv", ["fedssl", "-m", *words])
        assert cli.main() == 2
        assert f"no job of the sweep has valid settings: {reason}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
