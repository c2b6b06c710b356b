"""Every file of a run folder, damaged in many ways: each reader succeeds or reports one sentence."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client_app.state_store import load_state
from fedssl.config.load import load_settings
from fedssl.errors import InputError
from fedssl.evaluation import cli as evaluate
from fedssl.report import cli as report
from fedssl.runs.jsonl import SCHEMAS, read_jsonl
from server_app.callbacks.base import RunEnd
from server_app.callbacks.summary import Summary
from server_app.console import PlainConsole, log_to
from server_app.run_folder import RunFolder
from server_app.trackers.base import SafeTracker
from simulation import cli as fedssl

WORDS = ["num_clients=2", "rounds=2", "local_epochs=1", "dataset.limit=40", "dataset.test_limit=20", "encoder.width=4"]
WORDS += ["threads=1", "method=byol", "partition=iid", "evaluate_every=1", "final_evaluation=knn", "collapse_images=6"]
WORDS += ["measure_resources=false", "augmentation=none"]

SETTINGS = ["config.yaml", "overrides.yaml", "choices.yaml", "summary.json"]
LINES = ["metrics.jsonl", "clients.jsonl", "health.jsonl"]
STATES = [f"checkpoints/round-000002.{end}" for end in ("pt", "json")]
STATES += ["clients/0000/0/round-000002.safetensors"]
DRAWN = ("metrics", "cosines", "spectrum", "tsne", "sphere", "cka", "partition")
FIGURES = [f"figures/{name}.png" for name in DRAWN]
OTHERS = ["representations.npz", "encoder.pt", "partition.csv", "run.log", ".lock"]
ALIKE = [f"checkpoints/round-000001.{end}" for end in ("pt", "json")]  # as those above
ALIKE += [
    "clients/0000/0/round-000001.safetensors",
    *(f"clients/0000/1/round-00000{round}.safetensors" for round in (1, 2)),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    fedssl.run([*WORDS, f"output_dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def settings(whole):
    return composed(whole)


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("fedssl.plots.embeddings.tsne", lambda h, *, seed: np.zeros((*h.shape[:2], 2)))


def written(content):
    def damage(file):
        file.write_bytes(content(file.read_bytes()) if callable(content) else content)

    return damage


def folder_there(file):
    file.unlink()
    file.mkdir()


def loop(file):
    file.unlink()
    file.symlink_to(file)


DAMAGES = {
    "empty": written(b""),
    "cut": written(lambda content: content[: len(content) // 2]),
    "flipped": written(
        lambda content: bytes([*content[:9], content[9] ^ 255 if len(content) > 9 else 0, *content[10:]])
    ),
    "random": written(random.Random(0).randbytes(300)),
    "zeros": written(bytes(300)),
    "list": written(b"[]\n"),
    "object": written(b"{}\n"),
    "word": written(b'"word"\n'),
    "number": written(b"3\n"),
    "null": written(b"null\n"),
    "nested": written(b"[" * 20_000),
    "interpolation": written(b"seed: ${oc.env:HOME}\nrounds: 2\nrun_id: a\ndataset: {}\n"),
    "folder": folder_there,
    "loop": loop,
}


def reported(folder):
    """Return the output of ``fedssl-report --figures``."""
    report.figures([folder], [], into=None, settings=[])
    report.report([folder], out=None)


def evaluated(folder):
    """Return the output of ``fedssl-evaluate``."""
    return evaluate.run([f"run={folder}", "evaluation=knn"])


def composed(folder):
    """Return the settings of a resumed run."""
    return load_settings([f"resume={folder}"])


def restored(folder, settings=None):
    """Read and write the other files of a resumed run; ``settings`` are of a copy."""
    settings = settings or composed(folder)
    settings = replace(settings, recording=replace(settings.recording, folder=folder))
    files, tracker = RunFolder(settings.recording, rounds=settings.rounds), SafeTracker(settings.recording)
    with files.locked(), log_to(folder, PlainConsole()):
        state = files.restore()
        for client in (0, 1):
            load_state(folder / "clients" / "0000" / str(client), before=state.round + 1)
        Summary(files, settings, tracker, few_images=0, started=0.0).on_run_end(RunEnd(final={}))


FEW = ("random", "folder", "loop")  # of which a reader rejects the last two by the same line
READERS = {
    reported: {
        **dict.fromkeys([*SETTINGS, *LINES, "representations.npz", "partition.csv"], DAMAGES),
        **dict.fromkeys(FIGURES[-2:], FEW),
    },
    evaluated: {"config.yaml": DAMAGES, "encoder.pt": DAMAGES},
    composed: {"config.yaml": DAMAGES, "overrides.yaml": DAMAGES},
    restored: {
        **dict.fromkeys([*LINES, *STATES], DAMAGES),
        **dict.fromkeys([*SETTINGS, *FIGURES[:1], *OTHERS], FEW),
    },
}
"""Kinds of damage to the files of each reader; files that are only written may be replaced by something else."""


def answer_of(reader, *arguments):
    """Return the sentence of the reader, None if it succeeds."""
    try:
        reader(*arguments)
    except InputError as error:
        return str(error)
    return None


def test_all_files_are_covered(folder):
    reported(folder)  # draws what a run itself does not
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    drawn = {str(Path(name).with_suffix(end)) for name in FIGURES for end in (".pdf", ".csv")}
    assert files - drawn == {*SETTINGS, *LINES, *STATES, *ALIKE, *FIGURES, *OTHERS}
    assert drawn <= files


def test_undamaged_files_are_read(folder):
    for reader in READERS:
        reader(folder)


def cases():
    """Every reader with every file; with few kinds of damage without --heavy."""
    for reader, names in READERS.items():
        for name, kinds in names.items():
            few = FEW[:1] if reader is reported or reader is restored else FEW
            yield reader, name, few
            yield pytest.param(reader, name, kinds, marks=pytest.mark.heavy)


@pytest.mark.parametrize(("reader", "name", "kinds"), list(cases()))
def test_a_damaged_file_causes_no_traceback(whole, settings, tmp_path, reader, name, kinds):
    for kind in kinds:
        copy = Path(shutil.copytree(whole, tmp_path / kind))
        (copy / name).touch()  # t-SNE and sphere are drawn by the report only
        DAMAGES[kind](copy / name)
        message = answer_of(reader, copy, *([settings] if reader is restored else []))
        assert message is None or ("\n" not in message and str(copy) in message), (kind, message)


@pytest.mark.parametrize("name", LINES)
def test_invalid_values_are_reported(folder, name):
    file = folder / name
    lines = file.read_text().splitlines()
    kinds = SCHEMAS[file.stem]
    assert kinds.keys() <= {key for line in lines for key in json.loads(line)} | {
        *("cost", "virtual_seconds", "virtual_time", "base", "base_bytes"),  # of other runs
    }
    for key in kinds:
        for wrong in ([], {"a": []}, [[1]], True, -1.5, "\x1b[2J" if key not in ("model",) else 1, float("inf")):
            if not kinds[key](wrong):
                file.write_text(json.dumps(json.loads(lines[0]) | {key: wrong}) + "\n")
                with pytest.raises(InputError, match=f"{key} in line 1 has a value that no run writes there"):
                    read_jsonl(file)


def test_a_report_prints_no_control_characters(folder, capsys):
    summary = json.loads((folder / "summary.json").read_text())
    del summary["checksum"]
    failed = {**summary, "status": "failed", "reason": "no\x1b[2J GPU", "overrides": ["dataset.limit=\x1b]0;x\x07"]}
    other = Path(shutil.copytree(folder, folder.parent / "other"))
    (other / "summary.json").write_text(json.dumps(failed))
    report.report([folder, other], out=None)
    printed = capsys.readouterr().out
    assert "no [2J GPU" in printed
    assert "\x1b" not in printed
    assert "\x07" not in printed
