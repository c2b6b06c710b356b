"""Damaged run folders are used or rejected in one sentence, and no other file changes.

One kind of damage is drawn, and with ``--heavy`` every kind four times.
"""

import json
import os
import random
import shutil
import sys
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from client_app.state_store import read_state, save_state
from fedssl.config.load import load_settings
from fedssl.errors import InputError, RunError
from fedssl.evaluation import cli as evaluate
from fedssl.report import cli as report
from fedssl.runs.manifest import file_part, read_manifest, write_manifest
from server_app.checkpoint import manifest_file
from simulation import cli as fedssl
from tests.cases import some
from tests.runs import KNN, SMALL

WORDS = [*SMALL, *KNN, "rounds=2", "method=byol", "collapse_images=6"]
SECRET = "a5f1d29c77"  # of the environment: nothing may print it
VALUES = [None, True, -1, 0, 10**6, 10**30, 1e308, float("nan"), float("inf"), "", "word", "a" * 10_000, [], {}, [[1]]]
VALUES += [
    "${oc.env:SECRET}",
    "\x1b[2J",
    "=1+1",
    "../x",
    "/x",
    {"_target_": "fuzzed.make"},
    "$\\frac{",
    "é\ud800",
    2**63,
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    fedssl.run([*WORDS, f"output_dir={folder}"])
    return folder


@pytest.fixture
def workspace(whole, tmp_path, monkeypatch):
    """A copy of the run to damage, files that must not change, and a module that must not be imported."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "sentinel").mkdir()
    (tmp_path / "sentinel" / "file").write_text("as it was")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "fuzzed.py").write_text("from pathlib import Path\nmake = Path.touch\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setattr("fedssl.plots.embeddings.tsne", lambda features: np.zeros((len(features), 2)))
    return tmp_path


def some_file(run, draw, *ends):
    files = sorted(file for file in run.rglob("*") if file.is_file() and file.name.endswith(ends or ("",)))
    return draw.choice(files)


def flip(run, sentinel, draw):
    file = some_file(run, draw)
    content = bytearray(file.read_bytes() or b"x")
    for _ in range(draw.choice((1, 3, 30))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(run, sentinel, draw):
    file = some_file(run, draw)
    os.truncate(file, draw.randrange(file.stat().st_size + 1))


def grow(run, sentinel, draw):
    os.truncate(some_file(run, draw, "yaml", "json", "jsonl", "safetensors", "pt", "npz"), 10 * 2**30)  # no room


def swap(run, sentinel, draw):
    one, other = some_file(run, draw), some_file(run, draw)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def other_kind(run, sentinel, draw):
    file = some_file(run, draw)
    file.unlink()
    kinds = [file.mkdir, lambda: os.mkfifo(file), lambda: file.symlink_to(file), lambda: file.symlink_to("/dev/zero")]
    kinds += [lambda: file.symlink_to(sentinel / "file"), lambda: file.symlink_to(sentinel / "new")]
    draw.choice(kinds)()


def folder_elsewhere(run, sentinel, draw):
    folder = draw.choice([run / name for name in ("checkpoints", "figures", "clients", "clients/0000/0", "evaluation")])
    shutil.rmtree(folder, ignore_errors=True)
    folder.symlink_to(sentinel)


def bomb(run, sentinel, draw):
    rows = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]" for n in range(1, 12))]
    bombs = ["\n".join(rows), "[" * 100_000, "{a: " * 50_000, "- " * 100_000, '{"a":' * 100_000]
    some_file(run, draw, "yaml", "json", "jsonl").write_text(draw.choice(bombs) + "\n")


def put(value, draw):
    """Return the data with one value replaced, at any depth."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw.random() < 0.1:
        return draw.choice(VALUES)
    at = draw.choice(keys)
    value[at] = put(value[at], draw)
    if isinstance(value, dict) and draw.random() < 0.1:
        value[str(draw.choice(VALUES))] = value.pop(at)
    return value


def wrong_setting(run, sentinel, draw):
    file = run / draw.choice(("config.yaml", "choices.yaml", "config.yaml"))
    file.write_text(yaml.safe_dump(put(yaml.safe_load(file.read_text()), draw)))


def wrong_word(run, sentinel, draw):
    overrides = yaml.safe_load((run / "overrides.yaml").read_text())
    new = ["hydra.searchpath=[file:///tmp]", "++dataset._target_=fuzzed.make", "+method.x={_target_:fuzzed.make}"]
    new += ["seed=${oc.env:SECRET}", "augmentation='${oc.env:SECRET}'", f"dataset.cache={sentinel}", "run_id=../x"]
    new += [f"output_dir={sentinel}", f"++output_dir={sentinel}", f"hydra.run.dir={sentinel}"]
    new += ["~output_dir", "threads=0"]
    new += ["strategy=[fedavg]", "method=../../x", "+method/fedu=../../x", "engine.address=10.0.0.1:1"]
    new += ["seed=[[[[", "=", ""]
    new += ["hydra/launcher=x", "encoder.width=1000000000000", "dataset.size=1000000"]
    new += ["num_clients=1,2", "~encoder", "a=b"]
    new += [f"{word.partition('=')[0]}={draw.choice(VALUES)}" for word in overrides]
    if draw.random() < 0.5:
        overrides.append(draw.choice(new))
    else:
        overrides[draw.randrange(len(overrides))] = draw.choice(new)
    (run / "overrides.yaml").write_text(yaml.safe_dump(overrides))


def wrong_line(run, sentinel, draw):
    file = some_file(run, draw, ".json", ".jsonl")
    digest, manifest = "", file.parent.name == "checkpoints"
    if manifest:  # its first line is a digest
        digest, _, text = file.read_text().partition("\n")
        lines = [text]
    else:
        lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(put(json.loads(lines[at]), draw))
    file.write_text("\n".join([digest] * manifest + lines) + "\n")


def wrong_tensor(value, draw):
    """Return the data with one tensor or another value replaced."""
    if isinstance(value, torch.Tensor):
        kinds = [value.double(), value[None], value.flatten()[:0], torch.full((3,), float("nan")), "word", None, 10**30]
        kinds += [value.float() * float("nan"), torch.ones(1).expand(10**12), torch.ones(2, 2).to_sparse()]
        return draw.choice(kinds)
    if isinstance(value, dict) and value:
        at = draw.choice(list(value))
        value[at] = wrong_tensor(value[at], draw)
        if draw.random() < 0.2:
            value[draw.choice(["other", 3, None, ("a",)])] = value.pop(at)
        return value
    return put(value, draw)


def wrong_archive(run, sentinel, draw):
    file = some_file(run, draw, ".pt")
    content = wrong_tensor(torch.load(file, weights_only=True), draw)
    torch.save(content, file)
    if file.parent.name == "checkpoints":
        manifest = read_manifest(manifest_file(file))
        write_manifest(manifest_file(file), replace(manifest, parts=(file_part(run, file), *manifest.parts[1:])))


def wrong_state(run, sentinel, draw):
    file = some_file(run, draw, ".safetensors")
    state = {name: value.clone() for name, value in read_state(file).items()}
    name = draw.choice(list(state))
    kinds = [state[name].double(), state[name][None], state[name] * float("nan"), torch.zeros(0)]
    state[draw.choice([name, "other"])] = draw.choice(kinds)
    save_state(file.parent, state, round=int(file.stem[-6:]), oldest_resumable=0)


def wrong_arrays(run, sentinel, draw):
    file = run / "representations.npz"
    with np.load(file) as content:
        arrays = dict(content)
    name = draw.choice(list(arrays))
    kinds = [arrays[name].astype(object), arrays[name][None], np.full((2, 3, 4), np.nan), np.array(["\x1b[2J", "$x"])]
    arrays[name] = draw.choice(kinds)
    with file.open("wb") as stream:
        draw.choice((np.savez, np.savez_compressed))(stream, **arrays)


DAMAGES = [flip, cut, grow, swap, other_kind, folder_elsewhere, bomb, wrong_setting, wrong_word, wrong_line]
DAMAGES += [wrong_archive, wrong_state, wrong_arrays]


def resumed(run):
    fedssl.run([f"resume={run}", "rounds=3"])


def reported(run):
    options = {"folders": [run], "metrics": None, "into": None, "watch": None, "paper": None, "reference": None}
    try:
        report.figures(Namespace(**options, figures=[], config_dir=[]))
    finally:
        for out in (run.parent / "table.md", run.parent / "table.csv"):
            report.report(Namespace(**options, out=out))


def evaluated(run):
    evaluate.run([f"run={run}", "evaluation=knn"])


def ended_well(use, run):
    """Return whether the folder can be used; any other outcome must be one sentence."""
    output = ""
    try:
        use(run)
    except (InputError, RunError) as error:
        output = str(error)
    assert "\n" not in output
    return not output


def outside(workspace):
    """Return the files next to the run."""
    return {
        str(file.relative_to(workspace)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(workspace.rglob("*"))
        if "run" not in file.relative_to(workspace).parts[:1] and file.suffix not in (".md", ".csv") and file.is_file()
    }


@pytest.mark.parametrize("case", some(range(4 * len(DAMAGES)), default=[11]))
def test_a_damaged_folder_is_used_or_rejected_in_one_sentence(workspace, case, capfd, caplog):
    draw = random.Random(case)
    damage = DAMAGES[case % len(DAMAGES)]
    damage(workspace / "run", workspace / "sentinel", draw)
    before = outside(workspace)
    for use in (evaluated, reported, resumed):
        ended_well(use, workspace / "run")
    assert outside(workspace) == before
    assert "fuzzed" not in sys.modules
    printed = "".join(capfd.readouterr())
    printed += "".join(file.read_text() for file in workspace.glob("table.*"))
    assert SECRET not in printed + caplog.text
    assert "Traceback" not in printed
    assert "\x1b" not in printed


def test_the_undamaged_folder_can_be_used(workspace):
    assert all(ended_well(use, workspace / "run") for use in (evaluated, reported, resumed))
    assert load_settings([f"resume={workspace / 'run'}", "rounds=3"]).rounds == 3
