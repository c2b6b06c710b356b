"""Runs on the engine of their settings, and what is refused before they start."""

import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from omegaconf import OmegaConf

import fedssl
import simulation.run
from client_app import worker
from fedssl.config import load
from fedssl.errors import InputError
from server_app.callbacks.summary import Summary
from simulation import grid, ray_grid
from simulation.ray_session import RayNotStartedError
from simulation.resources import EngineChoice
from simulation.run import run
from tests.devices import write_images
from tests.runs import SMALL, UNTESTED, read_summary

QUICK = ["num_clients=3", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1"]
QUICK += ["evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]


def test_settings_are_composed_once_and_saved_once(tmp_path, monkeypatch):
    """The server in this process gets the settings of the command; a folder without labels changes its partition."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", 12)
    composed, resolve = [], load.resolve_config
    monkeypatch.setattr(load, "resolve_config", lambda overrides: composed.append(overrides) or resolve(overrides))
    data = ["dataset=folder", "dataset.path=images", "dataset.channels=3", "dataset.size=8"]
    data += ["dataset.splits.train=null", "dataset.splits.test=null", "dataset.mean=[0,0,0]", "dataset.std=[1,1,1]"]
    run([*QUICK[:2], *QUICK[3:], "rounds=1", *data])
    assert len(composed) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    config, overrides = OmegaConf.load(folder / "config.yaml"), OmegaConf.load(folder / "overrides.yaml")
    assert config.output_dir == str(folder)
    assert config.partition == {"_target_": "fedssl.partition.iid"}
    assert config.dataset.path == str(tmp_path / "images")
    assert {f"dataset.path='{tmp_path / 'images'}'", "partition=iid"} <= set(overrides)
    assert "dataset.path=images" not in overrides
    assert OmegaConf.load(folder / "choices.yaml").partition == "iid"


def test_a_run_needs_no_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user without an entry
    write_images(tmp_path / "images", 12)
    data = ["dataset=folder", f"dataset.path={tmp_path / 'images'}", "dataset.size=8", "partition=iid"]
    run([*QUICK[:2], *QUICK[3:], *data, "rounds=1", "engine=local", f"output_dir={tmp_path / 'run'}"])
    assert read_summary(tmp_path / "run")["status"] == "finished"


def test_a_program_reads_changed_images_again(tmp_path):
    settings = [*SMALL, *UNTESTED, "dataset=folder", "dataset.size=8", "dataset.channels=1", "dataset.splits.test=null"]
    images, first, second = write_images(tmp_path / "images", 24), tmp_path / "first", tmp_path / "second"
    fedssl.run(*settings, path=images, output_dir=first, rounds=1, engine="local")
    (images / "00.png").rename(images / "other.png")
    fedssl.run(*settings, path=images, output_dir=second, rounds=2, pause_after=1, engine="local")
    assert (second / "images.txt").read_text() != (first / "images.txt").read_text()
    with pytest.raises(InputError, match="the clients' images are in 24 files, .*; restore the files, or start a new"):
        fedssl.run(resume=first, rounds=2)
    shutil.copy(images / "02.png", images / "01.png")
    with pytest.raises(InputError, match="the clients' images are in 24 files, .*; restore the files, or start a new"):
        fedssl.run(resume=second)
    fedssl.run(*settings, path=images, output_dir=tmp_path / "third", rounds=1, engine="local")
    (trained,) = worker._workers.values()
    pixels = trained.images[torch.arange(2)]
    assert torch.equal(pixels[0], pixels[1])


def test_an_interrupt_before_the_run_starts_leaves_no_folder(tmp_path, monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(grid, "run_local", interrupt)
    (tmp_path / "before").mkdir()
    for name in ("new", "before"):
        with pytest.raises(KeyboardInterrupt):
            run([*QUICK, "engine=local", f"output_dir={tmp_path / name}"])
    assert [folder.name for folder in tmp_path.iterdir()] == ["before"]


@pytest.fixture
def nothing_starts(monkeypatch):
    for module, name in ((simulation.run, "choose_on_cpus"), (ray_grid, "run_ray"), (grid, "run_local")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: pytest.fail(f"{name} was called"))


@pytest.mark.parametrize("engine", ["auto", "ray"])
def test_unavailable_gpus_are_refused_before_data_is_read(tmp_path, nothing_starts, engine):
    overrides = [*QUICK, "dataset=cifar10", f"engine={engine}", "engine.client_gpus=0.5", "device=cpu"]
    message = "engine.client_gpus=0.5 but clients can use 0 GPUs; set engine.client_gpus=0"
    with pytest.raises(InputError, match=message):
        run([*overrides, f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["auto", "local", "ray"])
@pytest.mark.parametrize("setting", ["cuda_graphs=true", "gpu_augmentation=triton"])
def test_what_needs_cuda_is_rejected_before_the_start(tmp_path, nothing_starts, engine, setting):
    overrides = [*QUICK, setting, "optimizer.fused=true", f"engine={engine}", "device=cpu"]
    overrides += [f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(InputError, match=f"{setting} needs device=cuda but the device is cpu"):
        run(overrides)
    assert not (tmp_path / "run").exists()


def test_without_ray_the_engine_auto_is_local(tmp_path, monkeypatch, capsys):
    def fail(**given):
        raise RayNotStartedError("Ray could not be started: no answer; use engine=local") from OSError("no answer")

    monkeypatch.setattr(simulation.run, "choose_on_cpus", lambda settings: EngineChoice("ray", 2, "a test"))
    monkeypatch.setattr(ray_grid, "ray_session", fail)
    words = [*QUICK, "rounds=1", "device=cpu"]
    folder = run([*words, f"output_dir={tmp_path / 'auto'}"])
    assert (read_summary(folder)["status"], (folder / "encoder.pt").exists()) == ("finished", True)
    assert "\nengine=local: Ray could not be started (no answer)\n" in capsys.readouterr().out
    with pytest.raises(RayNotStartedError, match="no answer; use engine=local"):
        run([*words, "engine=ray", f"output_dir={tmp_path / 'ray'}"])


def test_a_new_process_checks_what_clients_exchange(tmp_path, monkeypatch, nothing_starts):
    """Rules of a round plan one before any engine has named the run that Flower's messages contain."""
    monkeypatch.setattr(TaskIdentity, "_run_id", None)
    overrides = [*QUICK, "engine=local", "aggregation.buffered=true", "strategy=clustered"]
    with pytest.raises(InputError, match="aggregation.buffered=true needs clients that all send and receive the whole"):
        run([*overrides, f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_run_with_relative_paths_resumes_in_another_folder(tmp_path, monkeypatch):
    for name, lines in (("here", "0\n1\n2\n" * 20), ("there", "0\n" * 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.csv").write_text(f"client\n{lines}")
    monkeypatch.chdir(tmp_path / "here")
    run([*QUICK, "rounds=1", "partition=file", "partition.file=p.csv", "engine=local", "output_dir=run"])
    monkeypatch.chdir(tmp_path / "there")
    run([f"resume={tmp_path / 'here' / 'run'}", "rounds=2"])
    folder = tmp_path / "here" / "run"
    assert OmegaConf.load(folder / "config.yaml").partition.file == str(tmp_path / "here" / "p.csv")
    assert read_summary(folder)["rounds"] == 2


def test_a_finished_run_is_never_removed(tmp_path, monkeypatch):
    """The file of its rounds cannot be read at its end."""
    original = Summary.on_run_end

    def damage(self, end):
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write("x\n")
        original(self, end)

    monkeypatch.setattr(Summary, "on_run_end", damage)
    with pytest.raises(InputError, match="metrics.jsonl"):
        run([*QUICK, "rounds=1", "engine=local", f"output_dir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    for file in (tmp_path / "run" / "checkpoints").iterdir():  # as between two checkpoints
        file.unlink()
    assert not simulation.run._is_removable(tmp_path / "run", rejected=True)


def test_a_closed_output_does_not_end_a_run(tmp_path):
    words = [*QUICK, "rounds=1", f"output_dir={tmp_path / 'run'}"]
    with Path("/dev/full").open("w") as full:
        code = "from fedssl.command_line import fedssl; fedssl()"
        subprocess.run([sys.executable, "-c", code, *words], stdout=full, check=True)
    assert read_summary(tmp_path / "run")["status"] == "finished"
