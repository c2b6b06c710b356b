"""The command ``fedssl-runs``: lists, ranks and shows runs, and gets over folders that are damaged or another's."""

import json
import re
import sys
from pathlib import Path

import pytest

from fedssl.config.load import compose
from fedssl.config.saved_run import save_run
from fedssl.runs.cli import main


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command; returns exit status, standard output and standard error."""

    def call(*overrides: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedssl-runs", *map(str, overrides)])
        status = main()
        return status, *capsys.readouterr()

    return call


def job(folder: Path, *overrides: str, status: str | None = "finished", **results: float) -> Path:
    """A folder as runs leave it."""
    folder.mkdir(parents=True)
    save_run(compose(overrides).recording, folder)
    summary = {"status": status, "reason": None if status == "finished" else "no GPU"}
    summary["rounds"] = rounds = 20 if status == "finished" else 0
    summary |= {"overrides": overrides, "command": " ".join(["fedssl", *overrides])}
    summary |= {"final": {"federated": results}} if status == "finished" else {}
    if status is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if rounds:
        (folder / "metrics.jsonl").write_text("".join(f'{{"round": {round}}}\n' for round in range(1, rounds + 1)))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a sweep, the first of them twice; others, a failed run, one at work, and folders of others."""
    root = tmp_path_factory.mktemp("runs")
    sweep = root / "2026-01-02_03-04-05"
    job(sweep / "0", "strategy=fedavg", "seed=0", knn=0.5)
    job(sweep / "1", "strategy=fedavg", "seed=1", knn=0.75)
    job(root / "2026-01-01_00-00-00", "strategy=fedavg", "seed=0", "tracker=tensorboard", knn=0.5)
    job(root / "2026-01-03_00-00-00", "strategy=l_dawa", "partition.alpha=0.1", "method=byol", knn=0.7, norm=3.5)
    job(root / "2026-01-04_00-00-00", "strategy=eua", status="failed")
    work = job(root / "2026-01-05_00-00-00", "strategy=fedavg", "rounds=9", status=None)
    lines = [{"round": 1, "evaluation": {"knn": 0.25}}, {"round": 2}]
    (work / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"rou')
    files = {"damaged": ("config.yaml", "a: &b [*b"), "foreign": ("summary.json", "[1, 2]")}
    for name, (file, text) in {**files, "broken": ("summary.json", '{"status": 7')}.items():
        (root / name).mkdir()
        (root / name / file).write_text(text)
    return root


def test_list(runs, command):
    status, out, _ = command("list", runs)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == [
        "date",
        "run",
        "status",
        "rounds",
        "strategy",
        "method",
        "partition",
        "alpha",
        "K",
        "results",
    ]
    columns = [re.split(r"\s{2,}", line) for line in lines[1:7]]
    assert [row[2] for row in columns] == ["ended from outside", "failed", *["finished"] * 4]
    assert columns[0][0] == "2026-01-05 00:00:00"
    assert lines[1].split()[6:] == ["2/9", "fedavg", "simclr", "dirichlet", "0.5", "10", "knn", "25.0%"]
    assert lines[3].split()[5:] == ["l_dawa", "byol", "dirichlet", "0.1", "10", "knn", "70.0%", "norm", "350.0%"]
    assert lines[4].split()[:3] == ["2026-01-02", "03:04:05", f"{runs}/2026-01-02_03-04-05/1"]
    said = lines[7:]
    assert len(said) == 4
    assert f"{runs}/2026-01-05_00-00-00/metrics.jsonl: 1 unreadable line" in said
    assert any("damaged/config.yaml cannot be used (" in line for line in said)
    assert sum("no readable summary.json and no config.yaml" in line for line in said) == 2


@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        (["strategy=fedavg"], 4),
        (["strategy=fedavg,eua", "status=finished"], 3),
        (["partition.alpha=0.10"], 1),
        (["keep_freed_memory=true", "rounds=20.0"], 5),
        (["seed=7"], 0),
    ],
)
def test_words_keep_what_agrees(runs, command, overrides, number):
    status, out, _ = command("list", *overrides, runs, "--json")
    assert (status, len(json.loads(out)["runs"])) == (0, number)


def test_of_an_error_the_smallest_is_best(tmp_path, command):
    for name, error in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        file = job(tmp_path / name, f"optimizer.lr={error}", regression_mae=error) / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"units": {"regression_mae": "error"}}))
    _, out, _ = command("best", "regression_mae", tmp_path)
    assert [line.split()[-1][-1] for line in out.splitlines()[1:]] == ["b", "c", "a"]


def test_seeds_with_other_evaluations_are_apart(tmp_path, command):
    for seed, neighbors in enumerate((200, 1, 200)):
        job(tmp_path / str(seed), f"seed={seed}", "final_evaluation=knn", f"final_evaluation.k={neighbors}", knn=0.5)
    rows = command("best", "knn", tmp_path)[1].splitlines()
    assert rows[0].split()[9:] == ["final_evaluation.k", "best", "run"]
    assert [(row.split()[-2], "± 0.0" in row) for row in rows[1:]] == [("200", True), ("1", False)]


def test_null_is_a_value(tmp_path, command):
    """Typed or by default."""
    for name, *overrides in (("a", "clip_norm=null"), ("b", "seed=1"), ("c", "clip_norm=2")):
        job(tmp_path / name, *overrides, knn=0.5)
    assert len(json.loads(command("list", "clip_norm=null", tmp_path, "--json")[1])["runs"]) == 2
    assert len(json.loads(command("best", "knn", tmp_path, "--json")[1])["ranked"]) == 2
    assert command("list", "clip_norm=null", tmp_path / "b")[0] == 0


def test_a_value_may_have_a_comma(tmp_path, command):
    job(tmp_path / "a", "dataset=cifar10", "dataset.mean=[0.5,0.25,0]")
    job(tmp_path / "b", "seed=1")
    for typed in ("dataset.mean=[0.5, 0.25, 0]", "dataset.mean=[0.5,0.25,0]"):
        assert len(json.loads(command("list", typed, tmp_path, "--json")[1])["runs"]) == 1


def test_arguments_may_follow_options(runs, command):
    listed = json.loads(command("list", runs, "--json", "method=byol")[1])["runs"]
    assert [run["status"] for run in listed] == ["finished"]
    assert len(json.loads(command("best", "--json", "knn", runs, "method=byol")[1])["ranked"]) == 1


def test_best_takes_seeds_for_one(runs, command):
    _, out, _ = command("best", "knn", runs)
    # 0.5 of seed 0, which ran twice and counts once, and 0.75: mean 0.625, sample deviation 0.25 / sqrt(2) = 0.17678.
    table = [line.split() for line in out.splitlines()[:3]]
    assert table[0] == ["knn", "(%)", "runs", "rounds", "strategy", "method", "partition", "alpha", "K", "best", "run"]
    assert table[1][:6] == ["1", "70.0", "1", "20", "l_dawa", "byol"]
    assert table[2][:7] == ["2", "62.5", "±", "17.7", "2", "20", "fedavg"]
    assert table[2][-1] == f"{runs}/2026-01-02_03-04-05/1"
    ranked = json.loads(command("best", "knn", runs, "--json")[1])["ranked"]
    assert [(round(row["knn"], 6), len(row["runs"])) for row in ranked] == [(0.7, 1), (0.625, 2)]


def test_seeds_of_an_older_version_are_one_row(tmp_path, command):
    """Its config lacks a setting, which has no value to compare."""
    for seed in (0, 1):
        job(tmp_path / str(seed), f"seed={seed}", knn=0.5)
    file = tmp_path / "0" / "config.yaml"
    file.write_text(re.sub(r"^collapse_images: .*\n", "", file.read_text(), flags=re.MULTILINE))
    assert len(json.loads(command("best", "knn", tmp_path, "--json")[1])["ranked"]) == 1


def test_show(runs, command):
    status, out, _ = command("show", runs / "2026-01-03_00-00-00")
    assert status == 0
    parts = out.split("\n\n")
    assert parts[0].splitlines()[1] == "2026-01-03 00:00:00  finished after 20 rounds"
    differs = {line.split()[0]: line.split()[1:] for line in parts[1].splitlines()[1:]}
    assert differs == {
        "strategy": ["l_dawa", "fedavg"],
        "method": ["byol", "simclr"],
        "partition.alpha": ["0.1", "0.5"],
    }
    assert [line.split() for line in parts[2].splitlines()] == [["result"], ["knn", "70.0%"], ["norm", "350.0%"]]
    assert parts[3] == "repeat it:  fedssl strategy=l_dawa partition.alpha=0.1 method=byol"
    files = [f"{name}.yaml" for name in ("choices", "config", "overrides")]
    found = [line.split()[0] for line in parts[4].splitlines()[1:]]
    assert found == sorted([*files, "metrics.jsonl", "summary.json"])
    told = json.loads(command("show", runs / "2026-01-04_00-00-00", "--json")[1])
    assert told["differs"] == {"strategy": {"value": "eua", "default": "fedavg"}}
    assert "failed after 0 rounds  (no GPU)" in command("show", runs / "2026-01-04_00-00-00")[1]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["list", "{runs}", "stratgy=fedavg"], "no run has a setting 'stratgy'; did you mean strategy"),
        (
            ["best", "knm", "{runs}"],
            "no finished run has the result 'knm'; did you mean knn or norm; there are knn, norm",
        ),
        (
            ["list", "{runs}", "status=interupted"],
            "no status=interupted; did you mean interrupted or pruned; choose one of finished",
        ),
        (["best", "--by", "foo"], "--by foo is none of rankme, alpha_req, lidar"),
        (["list", "nowhere"], "there is no folder nowhere"),
        (["list"], "there is neither runs nor multirun here"),
        (["show", "{runs}"], "is not a run folder"),
        (["show", "{runs}/damaged"], "cannot be used"),
        (["show", "{runs}/foreign"], "it is no run, or was none yet"),
    ],
)
def test_what_is_refused(runs, command, tmp_path, monkeypatch, overrides, sentence):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*(word.format(runs=runs) for word in overrides))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert sentence in err


def test_show_a_killed_run_in_a_folder_of_any_name(tmp_path, command):
    folder = job(tmp_path / "clients" / "a", "tracker=wandb", "tracker.mode=online", status=None)
    _, out, _ = command("show", folder)
    assert f"fedssl tracker.mode=online resume={folder}" in out
    assert "config.yaml" in out
