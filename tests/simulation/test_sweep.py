"""Sweeps: resuming, Hydra's own sweeps, and jobs in parallel, whose results are those of a sequential sweep."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fedssl.config.load import compose
from fedssl.datasets.base import forget_images
from fedssl.errors import InputError
from fedssl.report.accuracy_table import run_results, sweep_results
from fedssl.runs.run import is_locked, read_run
from simulation import cli
from simulation.pruning import check_metric
from simulation.run import run
from simulation.sweep import (
    JobWave,
    acquire_lock,
    folder_to_resume,
    needs_hydra,
    new_sweep_folder,
    remove_incomplete,
    run_job,
    run_jobs,
    sweep_lock,
    waiting_jobs,
)
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import Job
from simulation.sweep_state import plan_jobs as plan_state
from tests.devices import write_images
from tests.runs import SMALL, UNTESTED, read_summary
from tests.simulation.test_sweep_state import plan_jobs

QUICK = ["num_clients=3", "rounds=2", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1"]
QUICK += ["evaluate_every=0", "final_evaluation=knn", "collapse_images=0", "measure_resources=false"]


class TestFolder:
    def test_a_new_sweep_does_not_write_into_another(self, tmp_path):
        overrides = [f"hydra.sweep.dir={tmp_path / 'sweep'}"]
        assert new_sweep_folder(overrides) == tmp_path / "sweep"
        plan_jobs(tmp_path / "sweep", ["seed=0,1"])
        with pytest.raises(InputError, match="has a sweep; resume it with resume="):
            new_sweep_folder(overrides)

    def test_sweeps_of_the_same_second_have_different_folders(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        folders = [new_sweep_folder(["seed=0,1"]) for _ in range(10)]
        assert len({*folders}) == 10
        with sweep_lock(folders[0]), pytest.raises(InputError, match="is in use by another process"):
            acquire_lock(folders[0])

    def test_only_a_sweep_can_be_resumed_as_one(self, tmp_path):
        assert folder_to_resume(["seed=0,1"]) is None
        for value in (tmp_path / "missing", tmp_path, "a,b"):
            with pytest.raises(InputError, match="names no sweep, .* sweep.yaml; resume a run without -m"):
                folder_to_resume([f"resume={value}"])
        plan_jobs(tmp_path, ["seed=0,1"])
        assert folder_to_resume([f"resume={tmp_path}"]) == tmp_path


def finish(job, *, status="finished"):
    job.folder.mkdir(exist_ok=True)
    summary = {"status": status, "reason": "no images", "overrides": [], "rounds": 2, "final": {}}
    (job.folder / "summary.json").write_text(json.dumps(summary))


class TestResume:
    def test_only_what_is_missing_runs(self, tmp_path, capsys):
        jobs = plan_jobs(tmp_path, ["seed=0,1,2,3"])
        finish(jobs[0])
        finish(jobs[1], status="failed")
        finish(jobs[2], status="interrupted")
        assert waiting_jobs(jobs, retry=False) == [jobs[2], jobs[3]]
        assert "[job 1] failed: no images" in capsys.readouterr().out
        assert waiting_jobs(jobs, retry=True) == [jobs[1], jobs[2], jobs[3]]

    def test_a_job_in_use_is_not_started_again(self, tmp_path):
        jobs = plan_jobs(tmp_path, ["seed=0,1"])
        jobs[1].folder.mkdir()
        lock = acquire_lock(jobs[1].folder)
        with pytest.raises(InputError, match="in use by another process"):
            waiting_jobs(jobs, retry=False)
        lock.close()

    def test_jobs_resume_from_checkpoints_or_start_again(self, tmp_path):
        job, started = Job(tmp_path / "0", ("seed=0", "threads=1")), []
        job.folder.mkdir()
        (job.folder / "run.log").touch()
        remove_incomplete([job])
        assert not job.folder.exists()
        assert run_job(job, started.append) is None
        assert started == [["seed=0", "threads=1", f"output_dir='{job.folder}'"]]
        (job.folder / "checkpoints").mkdir(parents=True)
        (job.folder / "checkpoints" / "round-1.pt").touch()
        remove_incomplete([job])
        assert run_job(job, started.append) is None
        assert started[1] == ["threads=1", f"resume='{job.folder}'"]

    def test_a_failed_job_does_not_stop_the_others(self, tmp_path):
        jobs = plan_jobs(tmp_path, ["seed=0,1"])

        def fail_first(overrides):
            if "seed=0" in overrides:
                raise InputError("no images")

        run_jobs([JobWave(jobs)], fail_first, SweepProgress([job.folder for job in jobs]))
        assert read_summary(jobs[0].folder)["reason"] == "no images"
        assert waiting_jobs(jobs, retry=False) == jobs[1:]

    def test_images_may_move_before_a_sweep_is_resumed(self, tmp_path, monkeypatch):
        images, folder = write_images(tmp_path / "images", 24), tmp_path / "sweep"
        words = [*SMALL, *UNTESTED, "dataset=folder", "dataset.size=8", "dataset.splits.test=null", "seed=0,1,2"]

        def stop_in_the_second(overrides):
            if "seed=1" not in overrides:
                return run(overrides)
            run([*overrides, "pause_after=1"])
            raise KeyboardInterrupt

        monkeypatch.setattr(cli, "run", stop_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            cli._run_sweep([*words, f"dataset.path={images}", f"hydra.sweep.dir={folder}", "sweep.jobs=1"])
        monkeypatch.setattr(cli, "run", run)
        moved, other = images.rename(tmp_path / "moved"), write_images(tmp_path / "other", 24, seed=1)
        forget_images()  # as a new process
        assert cli._run_sweep([f"resume={folder}", f"dataset.path={moved}", "sweep.jobs=1"]) == 0
        assert list(encoders(folder)) == ["0", "1", "2"]
        jobs = sorted(folder.glob("[012]"))
        for results in (run_results([*map(read_run, jobs)]), sweep_results(jobs)):
            assert [row.runs for row in results.rows] == [3]
        (other / "00.png").rename(other / "other.png")
        assert len(plan_state(folder, [f"dataset.path={other}"]).jobs) == 6  # other images are other jobs


class TestHydra:
    """Sweeps by Hydra itself, with another sweeper or launcher."""

    def test_other_settings_of_hydra_need_it(self):
        assert not needs_hydra(["seed=0,1", "hydra.sweep.dir=x", "hydra.searchpath=[file:///x]"])
        assert needs_hydra(["seed=0,1", "hydra.verbose=true"])
        assert needs_hydra(["seed=0,1", "hydra/sweeper=optuna"])

    def test_a_missing_plugin_is_one_sentence(self):
        with pytest.raises(InputError, match="hydra/launcher=moon is not installed; .* hydra-moon-launcher"):
            new_sweep_folder(["seed=0,1", "hydra/launcher=moon"])

    def test_a_metric_without_a_protocol_is_one_sentence(self):
        settings = [compose(["final_evaluation=knn"])]
        check_metric("knn", settings, final=True)
        check_metric("rankme", settings, final=True)
        check_metric("linear", [*settings, compose(["final_evaluation=linear"])], final=True)
        check_metric("classifier", [*settings, compose(["method=supervised"])], final=True)
        with pytest.raises(InputError, match="linear is not a result of final_evaluation, which gives knn, rankme; "):
            check_metric("linear", settings, final=True)

    @pytest.mark.heavy
    def test_failed_jobs_and_the_table_are_in_files(self, tmp_path):
        status, output = sweep(
            tmp_path, "seed=0", "clients_per_round=2,9", "hydra.sweep.dir=sweep", "hydra.verbose=[]", "sweep.metric=knn"
        )
        assert status == 1, output
        assert "[job 1] failed: clients_per_round=9 is more than num_clients=3" in output
        assert len((tmp_path / "sweep/results.csv").read_text().splitlines()) == 1 + 2


def start(folder, *overrides):
    command = [sys.executable, "-c", "from fedssl.command_line import fedssl; fedssl()", "-m", *QUICK, *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)


def sweep(folder, *overrides):
    process = start(folder, *overrides)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def encoders(folder):
    return {file.parent.name: file.read_bytes() for file in sorted(folder.glob("*/encoder.pt"))}


@pytest.fixture(scope="module")
def sequential(tmp_path_factory):
    """A sweep of four jobs, of which two are invalid, one after the other."""
    folder = tmp_path_factory.mktemp("sequential")
    status, output = sweep(folder, "seed=0,1", "clients_per_round=2,9", "hydra.sweep.dir=sweep", "sweep.jobs=1")
    assert status == 1, output
    return folder / "sweep"


@pytest.mark.heavy
class TestParallelSweep:
    def test_equals_a_sequential_one(self, sequential, tmp_path):
        status, output = sweep(tmp_path, "seed=0,1", "clients_per_round=2,9", "hydra.sweep.dir=sweep", "sweep.jobs=2")
        assert status == 1, output
        assert "4 of 4 jobs ended, 2 failed" in output
        assert (tmp_path / "sweep/results.csv").read_text() == (sequential / "results.csv").read_text()
        assert len(encoders(sequential)) == 2
        assert encoders(tmp_path / "sweep") == encoders(sequential)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_resumes_after_a_signal_with_the_same_table(self, sequential, tmp_path, number):
        jobs = ["seed=0,1", "clients_per_round=2,9", "hydra.sweep.dir=sweep"]
        process = start(tmp_path, *jobs, "rounds=2")
        while not list(tmp_path.glob("sweep/*/checkpoints/*.pt")) and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=120)
        if number == signal.SIGINT:
            assert process.returncode == 130, output
            assert f"continue with: fedssl -m resume={tmp_path / 'sweep'}" in output
        deadline = time.monotonic() + 60
        while any(is_locked(job) for job in (tmp_path / "sweep").glob("[0-9]*")):
            assert time.monotonic() < deadline, "a job goes on without its sweep"
            time.sleep(0.2)
        status, output = sweep(tmp_path, "resume=sweep")
        assert status == 1, output
        assert (tmp_path / "sweep/results.csv").read_text() == (sequential / "results.csv").read_text()
        assert encoders(tmp_path / "sweep") == encoders(sequential)
