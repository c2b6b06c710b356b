"""Tables of results: of encoders, of a sweep, of any runs; and which row is marked as the best."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedssl.evaluation.scores import Score
from fedssl.report.accuracy_table import NOT_FINISHED, REPEATS, Row, best_rows, run_results, sweep_results
from fedssl.report.html_page import settings_table
from fedssl.runs.groups import compared_settings, group_runs
from fedssl.runs.run import read_run
from tests.runs import write_lines, write_run


def job(folder: Path, overrides: str, status: str = "finished", reason: str | None = None, **federated: float) -> Path:
    final = {"untrained": {"knn": 0.1}, "federated": federated, "pixels": {"knn": 0.2}}
    results = {"final": final} if status == "finished" else {}
    write_run(folder, overrides.split(), status=status, reason=reason, rounds=2, **results)
    write_lines(folder / "metrics.jsonl", [{"round": 1}, {"round": 2}])
    return folder


def values(row: Row, name: str = "knn") -> list[float]:
    return [score.value for score in row.metrics[name]]


@pytest.fixture
def sweep(tmp_path: Path) -> list[Path]:
    return [
        job(tmp_path / "0", "strategy=fedavg partition.alpha=0.1 rounds=5 seed=0", knn=0.5, linear=0.6, linear_std=0.1),
        job(tmp_path / "1", "strategy=fedavg partition.alpha=0.1 rounds=5 seed=1", knn=0.7, linear=0.6, linear_std=0.2),
        job(tmp_path / "2", "strategy=l_dawa partition.alpha=0.1 rounds=5 seed=0", knn=0.8, linear=0.9),
        job(tmp_path / "3", "strategy=l_dawa partition.alpha=0.1 rounds=5 seed=1", "failed", "loss is\nNaN | stop"),
        job(tmp_path / "4", "strategy=m_dawa partition.alpha=0.1 rounds=5 seed=0", "interrupted"),
        tmp_path / "5",
    ]


def test_sweep_groups_by_everything_but_the_seed(sweep: list[Path]):
    header = list(sweep_results(sweep).table().header)
    assert header == ["strategy", "knn (%)", "linear (%)", "runs", "failed"]  # the other settings do not vary
    rows, units, notes, _ = sweep_results(sweep)
    assert list(units) == ["knn", "linear"]
    found = [(row.settings["strategy"], row.runs, row.failed) for row in rows]
    assert found == [("fedavg", 2, 0), ("l_dawa", 1, 1), ("m_dawa", 0, 1)]
    assert rows[0].metrics == {"knn": [Score(0.5), Score(0.7)], "linear": [Score(0.6, std=0.1), Score(0.6, std=0.2)]}
    assert len(notes[NOT_FINISHED]) == 3


def test_sweep_text(sweep: list[Path], tmp_path: Path):
    # Sample deviation of 0.5 and 0.7: sqrt(2 * 0.1^2 / 1) = 0.1414.
    assert sweep_results(sweep).table().text().split("\n") == [
        "strategy      knn (%)  linear (%)  runs  failed",
        "fedavg    60.0 ± 14.1  60.0 ± 0.0     2       0",
        "l_dawa           80.0        90.0     1       1",
        "m_dawa              -           -     0       1",
        "",
        "not finished:",
        "",
        f"  {tmp_path / '3'} (strategy=l_dawa partition.alpha=0.1 rounds=5 seed=1): loss is NaN | stop",
        f"  {tmp_path / '4'} (strategy=m_dawa partition.alpha=0.1 rounds=5 seed=0): interrupted",
        f"  {tmp_path / '5'}: no readable summary.json: it was ended from outside, unless it runs on another machine",
    ]


def test_sweep_csv_has_full_precision(sweep: list[Path]):
    rows = list(csv.DictReader(sweep_results(sweep).table().csv().splitlines()))
    assert list(rows[0]) == ["strategy", "knn_mean", "knn_std", "linear_mean", "linear_std", "runs", "failed"]
    assert float(rows[0]["knn_mean"]) == pytest.approx(0.6, abs=1e-15)
    assert float(rows[0]["knn_std"]) == pytest.approx(np.std([0.5, 0.7], ddof=1), abs=1e-15)
    expected = {"knn_mean": "0.8", "knn_std": "", "linear_mean": "0.9", "linear_std": ""}
    assert rows[1] == {"strategy": "l_dawa", **expected, "runs": "1", "failed": "1"}
    assert rows[2]["knn_mean"] == ""


def test_one_run_keeps_its_deviation_over_draws(tmp_path: Path):
    """Two runs have that over seeds: of 0.5 and 0.7 it is 0.1 x sqrt(2)."""
    folders = [
        job(tmp_path / "0", "strategy=fedavg seed=0", few=0.5, few_std=0.03),
        job(tmp_path / "1", "strategy=fedavg seed=1", few=0.7, few_std=0.05),
        job(tmp_path / "2", "strategy=eua seed=0", few=0.6, few_std=0.04),
    ]
    table = sweep_results(folders).table()
    both, one = csv.DictReader(table.csv().splitlines())
    assert (float(both["few_std"]), one["few_std"]) == (pytest.approx(0.02**0.5), "0.04")
    assert "60.0 ± 14.1" in table.text()
    assert "60.0 ± 4.0" in table.text()
    note = "\n\n± in rows with one run is that of its evaluation, over draws of images or over models:\n\n  few"
    assert table.text().endswith(note)
    assert note not in sweep_results(folders[:2]).table().text()


def with_settings(
    folder: Path, overrides: str, settings: dict[str, Any], choices: dict[str, str] | None = None, **federated: float
) -> Path:
    """A finished run with settings, of which ``words`` were typed; ``choices`` were made without a word."""
    job(folder, overrides, **federated)
    defaults = {"seed": 0, "num_clients": 10, "rounds": 20, "threads": 1}
    defaults["partition"] = partition("dirichlet", alpha=0.5)
    defaults |= {name: {"_target_": target} for name, target in TARGETS.items()}
    (folder / "config.yaml").write_text(json.dumps(defaults | settings))  # JSON is YAML
    typed = dict(word.split("=") for word in overrides.split() if word.split("=")[0] in CHOICES)
    (folder / "choices.yaml").write_text(json.dumps(CHOICES | (choices or {}) | typed))
    return folder


def partition(name: str, **values: float) -> dict[str, Any]:
    return {"_target_": f"fedssl.partition.{name}", **values}


TARGETS = {
    "strategy": "strategies.l_dawa.LDAWA",
    "method": "fedssl.methods.simclr.SimCLR",
    "encoder": "fedssl.encoders.conv_small",
    "regularizer": "fedssl.regularizers.base.Regularizer",
}


CHOICES = {"strategy": "l_dawa", "method": "simclr", "encoder": "conv_small"}
CHOICES |= {"partition": "dirichlet", "regularizer": "none", "dataset": "cifar10"}


def rows(*folders: Path) -> list[tuple[dict[str, str], int]]:
    runs = [read_run(folder) for folder in folders]
    keys = run_results(runs).table().header
    found = run_results(runs)
    keys = found.table().header
    return [({key: row.settings[key] for key in keys if key in row.settings}, row.runs) for row in found.rows]


MAIN = {"strategy": "l_dawa", "method": "simclr", "encoder": "conv_small"}
MAIN |= {"partition": "dirichlet", "partition.alpha": "0.5", "num_clients": "10", "rounds": "20"}


def test_a_default_and_the_same_value_typed_are_one_row(tmp_path: Path):
    folders = [
        with_settings(tmp_path / "a", "", {}, knn=0.5),
        with_settings(
            tmp_path / "b", "strategy=l_dawa partition.alpha=0.5 threads=2 seed=1", {"threads": 2, "seed": 1}, knn=0.7
        ),
        with_settings(tmp_path / "c", "regularizer=none method=simclr seed=2", {"seed": 2}, knn=0.9),
    ]
    assert rows(*folders) == [(MAIN, 3)]


def test_a_whole_number_is_an_integer(tmp_path: Path):
    """Typed, in a changed file and in a list; true is no number."""
    found = [
        ("0", "partition.alpha=1", 1, [0, 0.5], 1),
        ("1", "partition.alpha=1.0 seed=1", 1.0, [0.0, 0.5], 1.0),
        ("2", "partition.alpha=1.0 seed=2", 1.0, [0.0, 0.5], True),
    ]
    folders = [
        with_settings(
            tmp_path / name,
            overrides,
            {"seed": int(name), "partition": partition("dirichlet", alpha=alpha), "betas": betas, "depth": depth},
        )
        for name, overrides, alpha, betas, depth in found
    ]
    assert rows(*folders[:2]) == [(MAIN | {"partition.alpha": "1"}, 2)]
    assert [(row["depth"], number) for row, number in rows(*folders)] == [("1", 2), ("True", 1)]
    runs = [read_run(folder) for folder in folders]
    assert settings_table(runs[:2]).header == ["run", "seed"]
    assert [len(group.runs) for group in group_runs(runs, compared_settings(runs))] == [2, 1]


def test_intervals_of_evaluation_matter_with_early_stopping(tmp_path: Path):
    """They decide the round after which a run ends; without early stopping they change no result."""
    found = [("knn", 1), ("knn", 3), ("knn", 3), (None, 1), (None, 3)]
    folders = [
        with_settings(
            tmp_path / str(n), f"seed={n}", {"seed": n, "evaluate_every": every, "early_stopping": {"monitor": monitor}}
        )
        for n, (monitor, every) in enumerate(found)
    ]
    assert [(row.get("evaluate_every"), number) for row, number in rows(*folders)] == [("1", 1), ("3", 2), ("", 2)]
    runs = [read_run(folder) for folder in folders]
    assert [len(group.runs) for group in group_runs(runs, compared_settings(runs))] == [1, 2, 2]


def test_the_newest_of_equal_runs_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    a, b, c, d, e = (tmp_path / f"2026-01-0{day}_00-00-00" for day in range(1, 6))
    folders = [
        with_settings(a, "strategy=l_dawa", {}, knn=0.8),
        with_settings(b, "seed=0 threads=4", {"threads": 4}, knn=0.8, linear=0.9),  # seed 0 is the default
        with_settings(d, "seed=1", {"seed": 1}, knn=0.5),
        with_settings(c, "seed=1", {"seed": 1}, knn=0.6),
        with_settings(e, "strategy=fedavg seed=1", {"seed": 1}, knn=0.5),
    ]
    runs = [read_run(folder) for folder in folders]
    results, table = run_results(runs), run_results(runs).table()
    assert [(row.runs, values(row)) for row in results.rows] == [(2, [0.8, 0.5]), (1, [0.5])]
    repeats = results.notes[REPEATS]
    assert repeats == [f"{a} repeats {b}", f"{c} repeats {d}, with other results (knn 60 and 50)"]
    assert [record.message for record in caplog.records] == [
        f"{c} and {d} have the same settings and seed but other results (knn 60 and 50), "
        f"a sign of other code, another machine or other threads; {d}, the newest, is used"
    ]
    notes = table.text().split("\n")[-4:]
    assert notes[0] == "not counted, because another run has the same settings and seed:"
    assert notes[2:] == [f"  {line}" for line in repeats]
    assert table.markdown().endswith(f"- {repeats[1]}\n")
    assert [row["runs"] for row in csv.DictReader(table.csv().splitlines())] == ["2", "1"]


def test_rows_differ_in_any_setting_that_was_given(tmp_path: Path):
    fur = {"regularizer": {"_target_": "fedssl.regularizers.fur.FUR"}}
    by_class = {"partition": partition("pathological", classes_per_client=2)}
    prox = {"regularizer": {"_target_": "fedssl.regularizers.prox.Proximal"}}
    folders = [
        with_settings(tmp_path / "0", "", {}),
        with_settings(tmp_path / "1", "+experiment=mine", fur, {"regularizer": "fur"}),  # chosen without a word
        with_settings(tmp_path / "2", "regularizer=fur", fur),
        with_settings(tmp_path / "3", "partition=pathological", by_class),
        with_settings(
            *(tmp_path / "4", "strategy=fedprox", {"strategy": {"_target_": "strategies.fedavg.FedAvg"}} | prox),
            {"regularizer": "prox"},
        ),
    ]
    last = {"regularizer": "none", "experiment": ""}
    assert rows(*folders) == [
        (MAIN | {"experiment": "", "regularizer": "none"}, 1),
        (MAIN | {"experiment": "mine", "regularizer": "fur"}, 1),
        (MAIN | {"experiment": "", "regularizer": "fur"}, 1),
        (MAIN | last | {"partition": "pathological", "partition.alpha": ""}, 1),
        (MAIN | last | {"strategy": "fedprox", "regularizer": "prox"}, 1),
    ]


def test_rows_differ_in_settings_of_changed_files(tmp_path: Path):
    """A file of settings was edited between two seeds: no override differs."""
    folders = [
        with_settings(tmp_path / "0", "+experiment=mine", {"local_epochs": 1}, knn=0.5),
        with_settings(tmp_path / "1", "+experiment=mine seed=1", {"local_epochs": 20, "seed": 1}, knn=0.7),
        with_settings(tmp_path / "2", "strategy=fedavg", {"other": 1}),  # a setting that others lack
        with_settings(tmp_path / "3", "strategy=fedavg seed=1", {"seed": 1}),
    ]
    found = [(row["strategy"], row["local_epochs"], runs) for row, runs in rows(*folders)]
    assert found == [("l_dawa", "1", 1), ("l_dawa", "20", 1), ("fedavg", "", 2)]


def test_the_best_row_is_among_those_of_the_same_data(tmp_path: Path):
    easy = [with_settings(tmp_path / f"a{n}", f"imbalance=1 seed={n}", {"seed": n}, knn=0.9 + n / 100) for n in (0, 1)]
    hard = [with_settings(tmp_path / f"b{n}", f"imbalance=9 seed={n}", {"seed": n}, knn=0.7 + n / 100) for n in (0, 1)]
    assert "*" not in run_results([read_run(folder) for folder in (*easy, *hard)]).table().text()


def test_runs_that_did_not_finish_are_listed(tmp_path: Path):
    finished = with_settings(tmp_path / "a", "", {}, knn=0.5)
    killed = with_settings(tmp_path / "b", "rounds=20", {})
    (killed / "summary.json").unlink()
    (killed / "overrides.yaml").write_text("[rounds=20, output_dir=x]")
    refused = job(tmp_path / "c", "rounds=0", "failed", "rounds=0 but\nit must be 1")
    nothing = tmp_path / "d"
    nothing.mkdir()
    (nothing / "run.log").touch()
    results = run_results([read_run(folder) for folder in (finished, killed, refused, nothing)])
    assert [(row.runs, row.failed) for row in results.rows] == [(1, 1), (0, 1)]
    ended = "no readable summary.json: it was ended from outside, unless it runs on another machine"
    lines = [
        f"{killed} (rounds=20): {ended}",
        f"{refused} (rounds=0): rounds=0 but it must be 1",
        f"{nothing}: {ended}",
    ]
    assert results.notes[NOT_FINISHED] == lines


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Two seeds m - s and m + s have the variance 2 s^2. The difference of two means has twice 2 s^2 / 2, i.e. the
        # deviation s sqrt(2), and Welch's test has 2 degrees of freedom: p = 1/2 - t / (2 sqrt(2 + t^2)) is 0.05 at
        # t = 2.92. With s = 0.01 that is a lead of 0.0413.
        ([[0.84, 0.86], [0.79, 0.81]], {0}),
        ([[0.79, 0.81], [0.84, 0.86]], {1}),
        ([[0.83, 0.85], [0.79, 0.81]], set()),
        # Each of the others counts: of the third row, far below, the seeds differ too much.
        ([[0.84, 0.86], [0.79, 0.81], [0.1, 0.7]], set()),
        ([[0.84, 0.86], [0.79, 0.81], [0.6, 0.62]], {0}),
        # One seed of either, no rival, nobody: nothing can be said.
        ([[0.9], [0.1, 0.2]], set()),
        ([[0.9, 0.9], [0.1]], set()),
        ([[0.9, 0.9]], set()),
        ([[], [0.9, 0.9], []], set()),  # rows without finished runs are no rivals
        ([[0.9, 0.9], [0.1, 0.1], [0.1]], set()),
        ([], set()),
        # Without any spread the permutation test has p = 1 / C(2n, n): 1 / 6, 1 / 20 and 1 / 70 with 2, 3 and 4 seeds.
        # Two equal seeds of each were marked before, as if they were certain, while --reference has p = 1.
        ([[0.5, 0.5], [0.6, 0.6]], set()),
        ([[0.5] * 3, [0.6] * 3], set()),
        ([[0.5] * 4, [0.6] * 4], {1}),
        ([[0.5] * 4, [0.5] * 4], set()),
        ([[0.6, 0.6], [0.5, 0.51]], {0}),  # of one row only
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_row_is_marked_if_welchs_test_prefers_it(values: list[list[float]], expected: set[int]):
    assert best_rows(values, ["same"] * len(values)) == expected
