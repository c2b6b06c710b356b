"""A run resumes only from a checkpoint whose client states and lines are intact, and names what it lacks."""

import re
import shutil

import numpy as np
import pytest

from fedssl.errors import InputError
from fedssl.runs.snapshots import save_layers
from fedssl.runs.verify import Verification, verify_run
from simulation.run import run
from tests.cases import some
from tests.runs import SMALL, UNTESTED, flip_bit, model_bits, read_lines, read_summary

OVERRIDES = [*SMALL, *UNTESTED, "method=byol", "strategy=fedu"]
STATE = "clients/0000/0/round-000003.safetensors"


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "three"
    run([*OVERRIDES, f"output_dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The result of a run of four rounds that nothing disturbed."""
    folder = tmp_path_factory.mktemp("run") / "four"
    run([*OVERRIDES, "rounds=4", f"output_dir={folder}"])
    return result(folder)


def result(folder):
    rounds, clients = read_lines(folder / "metrics.jsonl"), read_lines(folder / "clients.jsonl")
    numbers = [(line["round"], line["loss"]) for line in rounds], [(line["round"], line["client"]) for line in clients]
    return model_bits(folder), numbers


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "run.log"}


def replace_by_folder(file):
    file.unlink()
    file.mkdir()


def cut_lines(file, count):
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:count]))


def append(file, content):
    with file.open("ab") as stream:
        stream.write(content)


def repeat_last_line(file):
    file.write_text(file.read_text() + file.read_text().splitlines(keepends=True)[-1])


RECOVERABLE = {
    "no state": (lambda run: (run / STATE).unlink(), f"{STATE} is missing"),
    "flipped byte in a state": (lambda run: flip_bit(run / STATE, -5), f"{STATE} is damaged"),
    "folder in place of a state": (lambda run: replace_by_folder(run / STATE), f"{STATE} is "),
    "no last line of a client": (lambda run: cut_lines(run / "clients.jsonl", 5), "clients.jsonl has"),
    "bytes after the last line": (lambda run: append(run / "metrics.jsonl", b"{\xff\0"), None),
    "doubled last line": (lambda run: repeat_last_line(run / "metrics.jsonl"), None),
}


@pytest.mark.parametrize("damage", some(RECOVERABLE, default=["no state", "bytes after the last line"]))
def test_a_damaged_part_costs_a_round_and_changes_no_number(tmp_path, three_rounds, expected, damage):
    folder = shutil.copytree(three_rounds, tmp_path / "run")
    action, problem = RECOVERABLE[damage]
    assert verify_run(folder) == Verification((), (2, 3))
    action(folder)
    if problem:
        found = verify_run(folder)
        assert found.intact == (2,)
        assert any(text.startswith(f"checkpoint of round 3: {problem}") for text in found.problems)
    if "folder" in damage:
        with pytest.raises(InputError, match=f"{STATE} .*; remove it"):
            run([f"resume={folder}", "rounds=4"])
        (folder / STATE).rmdir()
    run([f"resume={folder}", "rounds=4"])
    assert result(folder) == expected
    recoveries = read_summary(folder)["recoveries"]
    assert len(recoveries) == (2 if "folder" in damage else problem is not None)
    assert all(text.startswith(f"the checkpoint of round 3 could not be used: {problem}") for text in recoveries)
    run([f"resume={folder}", "rounds=5"])
    assert read_summary(folder)["recoveries"] == recoveries  # for good


FATAL = {
    "no states": (
        lambda run: shutil.rmtree(run / "clients"),
        "clients/0000/0/round-000002.safetensors is missing and 1 more",
    ),
    "no states of a client": (lambda run: shutil.rmtree(run / "clients/0000/1"), "clients/0000/1/round-.* is missing"),
    "one line": (lambda run: cut_lines(run / "metrics.jsonl", 1), "metrics.jsonl has .* bytes instead of"),
    "no lines": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "no manifests": (lambda run: [file.unlink() for file in run.glob("checkpoints/*.json")], "round-000002.json is"),
    "changed number": (lambda run: flip_bit(run / "metrics.jsonl", 12), "metrics.jsonl is damaged"),
}


@pytest.mark.parametrize("damage", FATAL)
def test_without_an_intact_checkpoint_the_run_is_refused_and_unchanged(tmp_path, three_rounds, damage):
    folder = shutil.copytree(three_rounds, tmp_path / "run")
    action, problem = FATAL[damage]
    action(folder)
    before = contents(folder)
    found = verify_run(folder)
    assert not found.intact
    assert found.recovery == "no checkpoint is intact: the run cannot be resumed"
    assert any(re.match(f"checkpoint of round 2: {problem.split(' and 1')[0]}", text) for text in found.problems)
    with pytest.raises(InputError, match=rf"no checkpoint .* can be used \(2 tried; of round 2: {problem}") as error:
        run([f"resume={folder}", "rounds=4"])
    assert "restore the file from a copy, or start a new run" in str(error.value)
    assert before == contents(folder)


def test_a_run_without_its_checkpoints_is_unchanged(tmp_path, three_rounds):
    """Its rounds would be trained again, and its results would be gone. One that had none yet starts again."""
    folder = shutil.copytree(three_rounds, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    before = contents(folder)
    with pytest.raises(InputError, match=r"checkpoints has no checkpoint, but round 3 of the run had one; restore it"):
        run([f"resume={folder}", "rounds=4"])
    assert contents(folder) == before
    assert verify_run(folder).recovery == "no checkpoint is intact: the run cannot be resumed"
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    assert verify_run(folder).recovery == "resume starts with round 1"
    (folder / "overrides.yaml").unlink()
    found = verify_run(folder)
    assert found.problems[0] == "overrides.yaml is missing"
    assert found.recovery == "without its settings the run cannot be resumed"


def test_a_missing_checkpoint_and_missing_initial_weights_are_found(tmp_path, three_rounds):
    folder = shutil.copytree(three_rounds, tmp_path / "run")
    for suffix in ("pt", "json"):
        (folder / f"checkpoints/round-000003.{suffix}").unlink()
    assert verify_run(folder) == Verification(("the checkpoint of round 3 is missing",), (2,))
    (folder / "summary.json").unlink()  # a killed run may lack its last checkpoint
    assert verify_run(folder).problems == ("summary.json is missing or damaged",)
    shutil.rmtree(folder / "checkpoints")
    config = folder / "config.yaml"
    config.write_text(config.read_text().partition("\n")[2].replace("  weights: null\n", "  weights: /x.pt\n"))
    assert verify_run(folder).problems[1:] == (
        "initial_encoder.pt is missing, without which the run cannot be resumed",
        "the checkpoint of round 2 is missing",
    )


def test_damaged_snapshots_are_found(tmp_path, three_rounds):
    folder = shutil.copytree(three_rounds, tmp_path / "run")
    weights = np.ones(50, dtype=np.float32)
    save_layers(folder, 1, "client-0", {"encoder.weight": weights})
    file = folder / "models/round-000001/client-0.pt"
    assert verify_run(folder).problems == ()
    flip_bit(file, file.read_bytes().index(weights.tobytes()))
    assert verify_run(folder).problems == ("models/round-000001/client-0.pt is damaged",)
    replace_by_folder(file)
    assert verify_run(folder).problems == ("models/round-000001/client-0.pt is damaged",)
