"""The command ``fedssl-report``: what it prints, writes and draws, and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from fedssl.config.load import compose
from fedssl.config.saved_run import save_run
from fedssl.runs.run import read_run
from tests.runs import change_summary, read_summary, write_lines, write_run


def job(folder: Path, strategy: str, seed: int, status: str = "finished", knn: float = 0.5) -> Path:
    """A folder as runs leave it; the words do not tell all choices, ``choices.yaml`` does."""
    overrides = [f"strategy={strategy}", f"seed={seed}"]
    reason = None if status == "finished" else "no GPU"
    write_run(folder, overrides, status=status, reason=reason, final={"federated": {"knn": knn}})
    settings: dict[str, Any] = {"seed": seed, "num_clients": 5, "rounds": 3}
    settings["strategy"] = {"_target_": "strategies.fedavg.FedAvg"}
    settings["method"] = {"_target_": "fedssl.methods.byol.BYOL"}
    settings["encoder"] = {"_target_": "fedssl.encoders.vit_tiny"}
    settings |= {"partition": {"_target_": "fedssl.partition.dirichlet", "alpha": 0.1}}
    (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    choices = {"strategy": strategy, "method": "byol", "encoder": "vit_tiny", "partition": "dirichlet"}
    (folder / "choices.yaml").write_text(json.dumps(choices))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    job(tmp_path / "sweep" / "0", "fedavg", 0, knn=0.5)
    job(tmp_path / "sweep" / "1", "fedavg", 1, knn=0.7)
    job(tmp_path / "sweep" / "2", "eua", 0, "failed")
    return tmp_path / "sweep"


def test_table_of_a_sweep(sweep: Path, command):
    status, out, _ = command(sweep)
    assert status == 0
    # The sample deviation of 0.5 and 0.7 is 0.1414.
    assert out.splitlines() == [
        "strategy  method  encoder   partition  partition.alpha  num_clients  rounds      knn (%)  runs  failed",
        "fedavg    byol    vit_tiny  dirichlet  0.1              5            3       60.0 ± 14.1     2       0",
        "eua       byol    vit_tiny  dirichlet  0.1              5            3                 -     0       1",
        "",
        "not finished:",
        "",
        f"  {sweep / '2'} (strategy=eua seed=0): no GPU",
    ]


def test_tables_have_csv_files_with_differing_settings_first(sweep: Path, tmp_path: Path, command):
    line = {"round": 1, "seconds": 1.0, "clients": 2, "bytes_down": 20, "bytes_up": 20}
    for number in ("0", "1"):
        write_lines(sweep / number / "metrics.jsonl", ({**line, "round": round} for round in (1, 2, 3)))
    settings = json.loads((sweep / "2" / "config.yaml").read_text())
    (sweep / "2" / "config.yaml").write_text(json.dumps({**settings, "num_clients": 7}))
    _, out, _ = command(sweep, "--out", tmp_path / "table.csv")
    costs = tmp_path / "table_costs.csv"
    assert out.endswith(f"\nwritten to {tmp_path / 'table.csv'} and {costs}\n")
    assert list(pandas.read_csv(tmp_path / "table.csv").columns[:3]) == ["strategy", "num_clients", "method"]
    assert pandas.read_csv(costs)["bytes_up"].tolist() == [30]  # 3 rounds of 20 bytes from 2 clients


def test_a_file_that_cannot_be_written_stays_as_it_was(sweep: Path, tmp_path: Path, command, monkeypatch):
    (tmp_path / "table.md").write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    status, _, error = command(sweep, "--out", tmp_path / "table.md")
    assert status == 2
    assert "cannot be written (No space left on device)" in error
    assert (tmp_path / "table.md").read_text() == "before"


def test_a_damaged_run_is_left_out(sweep: Path, command, caplog):
    (sweep / "0" / "config.yaml").write_text("a: [")
    status, out, _ = command(sweep)
    assert (status, "knn (%)" in out) == (0, True)
    assert f"a run is left out: {sweep / '0' / 'config.yaml'} cannot be used (it is not valid YAML" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["missing"], "there is no folder missing; give the folders of runs"),
        (["."], "there is no run in .; give the folders of runs"),
        ([], "no folder is given; use fedssl-report DIR..., with --figures and --metrics after the folders"),
        (["--figures", "sweep"], "no folder is given"),
        (["sweep", "--figures", "landscap"], "--figures landscap does not exist; choose from partition, metrics,"),
        (["sweep/0", "--figures", "landscape"], "sweep/0 lacks landscape: sweep/0 has no snapshots"),
        (["sweep/0", "sweep/1", "--figures", "accuracy"], "the figure accuracy is of all 2 folders; add --into FOLDER"),
        (["sweep", "--figures", "accuracy", "--into", "no"], "--into no is not a folder; create it"),
        (["sweep", "--out", "table.txt"], "--out table.txt must end in one of .md, .csv, .tex, .html"),
        (["sweep", "--out", "no/table.md"], "--out no/table.md: the folder no does not exist; create it"),
        (["sweep", "--into", "sweep"], "--into sweep requires --figures NAME...; add it, or remove --into"),
        (["sweep", "--metrics", "knn", "lineer"], "--metrics lineer is not a result of these runs; choose from knn"),
        (["sweep", "--metrics", "knn", "--paper", "fedu.table1"], "--metrics and --paper exclude each other: a paper"),
        (["sweep/2", "--metrics", "lineer"], "no run has finished, so there are no results (sweep/2: no GPU)"),
        (["sweep/2"], "no run has finished, so there are no results (sweep/2: no GPU)"),
    ],
)
def test_bad_input_gets_one_sentence(sweep: Path, command, monkeypatch, overrides: list[str], problem: str):
    (sweep / "empty").mkdir()
    monkeypatch.chdir(sweep / "empty" if overrides == ["."] else sweep.parent)
    status, _, error = command(*overrides)
    assert status == 2
    assert error.startswith(f"fedssl-report: {problem}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["experiment=fedu2/base", "method=byol"])
def test_heads_of_a_paper_are_told_whoever_chose_them(tmp_path: Path, name: str):
    folder = job(tmp_path / "run", "eua", 0)
    save_run(compose([name]).recording, folder)
    change_summary(folder, overrides=[name])
    assert read_run(folder).value("method") == ("byol" if name == "method=byol" else "fedu2/byol")
    assert read_run(folder).value("schedule") == "end_to_end"  # no word says so


def test_a_reader_who_stops_early_gets_no_traceback(sweep: Path):
    command = [sys.executable, "-c", "from fedssl.command_line import fedssl_report; fedssl_report()", str(sweep)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_selected_metrics(sweep: Path, command):
    for number, linear in ((0, 0.8), (1, 0.9)):
        known = read_summary(sweep / f"{number}")["final"]["federated"]
        final = {"federated": known | {"linear": linear, "linear_2_per_class": 0.3}}
        change_summary(sweep / f"{number}", final=final)
    header, row = command(sweep, "--metrics", "linear", "knn")[1].splitlines()[:2]
    assert re.findall(r"\w+ \(%\)", header) == ["knn (%)", "linear (%)"]
    assert row.split()[-8:] == ["60.0", "±", "14.1", "85.0", "±", "7.1", "2", "0"]
    header = command(sweep, "--metrics", "linear")[1].splitlines()[0]
    assert "linear (%)" in header
    assert "knn" not in header
