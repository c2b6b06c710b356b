"""Whole runs on the local engine: the run folder, reproduction, resume, and learning."""

import fcntl
import signal
import subprocess
import sys

import pytest
import torch

from fedssl.errors import InputError, RunError
from fedssl.export import load_encoder
from server_app import training_loop
from server_app.callbacks import summary
from server_app.checkpoint import latest_checkpoint
from simulation.cli import main
from simulation.run import run
from tests.runs import ending, model_bits, read_lines, read_summary

TINY = ["num_clients=3", "rounds=2", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1"]
UNMEASURED = ["evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
QUICK = [*TINY, *UNMEASURED]
WORDS = ["strategy=fedavg", "clients_per_round=2", "evaluate_every=1", "final_evaluation=knn"]


MAIN = "from fedssl.command_line import fedssl; fedssl()"


@pytest.fixture
def fedssl_in_process(monkeypatch, capsys):
    """Return a function that runs the command in this process, and returns its exit status and standard error."""

    def call(*overrides):
        monkeypatch.setattr(sys, "argv", ["fedssl", *overrides])
        return main(), capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    run([*TINY, *WORDS, f"output_dir={folder}"])
    return folder


def test_run_folder(folder):
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert names == {
        ".lock",
        *("config.yaml", "overrides.yaml", "choices.yaml", "summary.json", "encoder.pt", "run.log"),
        *("metrics.jsonl", "clients.jsonl", "health.jsonl", "representations.npz", "figures/spectrum.png"),
        *("partition.csv", "figures/partition.png", "figures/metrics.png", "figures/cosines.png"),
        *(f"checkpoints/round-00000{round}.{end}" for round in (1, 2) for end in ("pt", "json")),
    }


def test_lines_of_rounds_and_clients(folder):
    rounds, clients = read_lines(folder / "metrics.jsonl"), read_lines(folder / "clients.jsonl")
    assert [line["round"] for line in rounds] == [1, 2]
    assert [line["round"] for line in clients] == [1, 1, 2, 2]
    for line in rounds:
        own = [client for client in clients if client["round"] == line["round"]]
        assert line["loss"] == pytest.approx(sum(client["loss"] for client in own) / 2)
        for cosine in ("model_cosine", "layer_cosine"):
            assert line[cosine] == pytest.approx(sum(client[cosine] for client in own) / 2)
            assert line[cosine] < 1
        assert line["bytes_up"] == sum(client["bytes_up"] for client in own)
        assert 0 < line["evaluation"]["knn"] <= 1
    state = load_encoder(folder / "encoder.pt").state_dict()
    table = (folder / "partition.csv").read_text().splitlines()
    examples = {int(row.split(",")[0]): int(row.split(",")[1]) for row in table[1:]}
    assert sum(examples.values()) == 60
    for client in clients:
        assert client["examples"] == examples[client["client"]]
        assert client["bytes_up"] > sum(value.nbytes for value in state.values())
        assert set(client["cosine"]) > {f"encoder.{name}" for name in state if name.endswith("weight")}


def test_summary(folder):
    summary = read_summary(folder)
    assert (summary["status"], summary["rounds"], summary["reason"]) == ("finished", 2, None)
    assert set(summary["final"]) == {"untrained", "federated", "pixels"}
    assert summary["command"] == " ".join(["fedssl", *TINY, *WORDS])


def test_the_exported_encoder_is_the_global_one(folder):
    encoder = load_encoder(folder / "encoder.pt")
    layers = latest_checkpoint(folder / "checkpoints").models["global"].layers
    for name, value in encoder.state_dict().items():
        assert (value.numpy() == layers[f"encoder.{name}"]).all()
    assert encoder.metadata["strategy"] == "FedAvg"


def test_a_folder_in_use_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="in use by another run"):
            run([*QUICK, f"output_dir={folder}"])


# BYOL keeps its target network at the clients, so client state takes part in these.
BYOL = (*QUICK, "method=byol", "rounds=4", "clients_per_round=2", "keep_checkpoints=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run([*BYOL, f"output_dir={folder}"])
    return folder


class TestResume:
    def test_longer_and_never_shorter(self, whole, tmp_path):
        folder = tmp_path / "run"
        run([*BYOL, "rounds=2", f"output_dir={folder}"])
        run([f"resume={folder}", "rounds=4"])
        assert model_bits(whole) == model_bits(folder)
        run([f"resume={folder}"])  # the raised number is remembered: nothing is left to do
        assert len(read_lines(folder / "metrics.jsonl")) == 4
        with pytest.raises(InputError, match="rounds=3 but the run has completed 4; set rounds=4 or more"):
            run([f"resume={folder}", "rounds=3"])
        assert ending(folder)[0] == "finished"


@pytest.mark.heavy  # tests/simulation/test_sandbox.py interrupts a run too
def test_ctrl_c_is_noted(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *QUICK, "rounds=500", f"output_dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )
    for line in process.stdout:
        if line.startswith("round 2/"):  # round 1 has a checkpoint
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    status, rounds, reason = ending(folder)
    assert (status, reason) == ("interrupted", "stopped by the user")
    assert 1 <= rounds < 500
    assert errors == f"fedssl: stopped after round {rounds}; continue with: fedssl resume={folder}\n"


@pytest.mark.parametrize(
    "overrides",
    [
        ["partition.alpha=0"],
        ["num_clients=31"],
        ["dataset.limit=many"],
        ["method=orchestra", "secure_aggregation=secagg_plus"],
    ],
)
def test_a_refused_run_leaves_nothing_of_its_own(tmp_path, overrides, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for given in ([], ["output_dir=new"], ["output_dir=mine"]):
        with pytest.raises(InputError):
            run([*QUICK, "engine=local", *overrides, *given])
    assert {folder.name for folder in tmp_path.iterdir()} - {"runs"} == {"mine"}  # what was there stays
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.parametrize("error", [RunError("too few sent a usable update"), KeyboardInterrupt()])
def test_what_ends_a_run_loses_no_finished_round(whole, tmp_path, error, monkeypatch):
    cut = tmp_path / "cut"
    original = training_loop.run_round

    def end_in_round_4(exchange, current_context, state, **options):
        if state.round == 3:
            raise error
        return original(exchange, current_context, state, **options)

    monkeypatch.setattr(training_loop, "run_round", end_in_round_4)
    with pytest.raises(type(error)):
        run([*BYOL, "checkpoint_every=10", f"output_dir={cut}"])
    monkeypatch.undo()
    assert latest_checkpoint(cut / "checkpoints").round == 3
    run([f"resume={cut}"])
    assert model_bits(whole) == model_bits(cut)
    assert [line["round"] for line in read_lines(cut / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_ends_without_the_metadata_of_a_package(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "VERSIONS", ("numpy", "a-package-that-is-copied"))
    run([*QUICK, "engine=local", "rounds=1", f"output_dir={tmp_path / 'run'}"])
    assert set(read_summary(tmp_path / "run")["versions"]) == {"python", "numpy"}


def test_results_are_kept_if_a_figure_fails(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("the font cannot be read")

    monkeypatch.setattr("server_app.callbacks.evaluation.save_partition_plot", fail)
    with pytest.raises(OSError, match="font"):
        run([*QUICK, "engine=local", "rounds=1", "final_evaluation=knn", f"output_dir={tmp_path / 'run'}"])
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["final"].keys() == {"federated", "untrained", "pixels"}


def test_a_run_whose_clients_all_fail_ends_with_the_reason(tmp_path, fedssl_in_process):
    # A learning rate of 1e30 makes every weight infinite within one round.
    status, errors = fedssl_in_process(*QUICK, "optimizer.lr=1e30", f"output_dir={tmp_path / 'run'}")
    assert status == 1
    assert "none of 3 clients sent a usable update" in errors
    assert "Traceback" not in errors
    status, _, reason = ending(tmp_path / "run")
    assert status == "failed"
    assert "values that are not finite" in reason


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rounds"], "rounds does not have the form key=value; write e.g. rounds=5"),
        (["optimizer.lr=-1"], "optimizer.lr=-1 must be a number of at least 0; the default is 0.03"),
        (["device=cuda"], "device=cuda but torch has cpu only"),
        (["dataset=folder", "dataset.path=/nowhere"], "/nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, overrides, sentence, fedssl_in_process):
    if overrides == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, errors = fedssl_in_process(*TINY, *overrides, f"output_dir={tmp_path / 'run'}")
    assert status == 2
    assert sentence in errors
    assert errors.startswith("fedssl: ")
    assert errors.count("\n") == 1


def test_a_wrong_name_stops_a_sweep_before_it_starts(tmp_path, fedssl_in_process):
    status, errors = fedssl_in_process("-m", "strategy=fedavg,l_dwa", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert status == 2
    assert "did you mean l_dawa" in errors
    assert not (tmp_path / "sweep").exists()


RUN = f"""
import sys
{MAIN}
slow = {{"sympy", "torch._dynamo", "torch._inductor", "torchvision", "pydicom"}} & set(sys.modules)
assert not slow, slow
"""


@pytest.mark.heavy
@pytest.mark.slow
def test_the_default_run_beats_pixels_and_an_untrained_encoder(tmp_path):
    """The table of the README: two labels per class give 82.9% beside 75.9% of pixels.

    It imports neither torch's compiler nor torchvision, nor what reads DICOM.
    """
    command = [sys.executable, "-c", RUN, "threads=1", f"output_dir={tmp_path / 'run'}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "run" / "figures" / "partition.png").stat().st_size > 10_000  # rendered
    final = read_summary(tmp_path / "run")["final"]
    # The 10 draws of two labels per class have a standard deviation of about 3 points, so 1 of their mean; the draws
    # are the same for all three.
    for other in ("untrained", "pixels"):
        assert final["federated"]["linear_2_per_class"] > final[other]["linear_2_per_class"] + 0.05
    assert "untrained" in finished.stdout
