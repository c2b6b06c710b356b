"""Differences paired by seed: which runs are compared, and the numbers of the table."""

import json
import math
from pathlib import Path

import pandas
import pytest

from fedssl.report.significance import detectable
from tests.fedssl.report.test_cli import job
from tests.runs import change_summary, read_summary


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """FedAvg and EUA differ by 1, 2 and 3 points over seeds 0 to 2; seed 3 of EUA and Krum have no partner."""
    folder = tmp_path / "runs"
    for seed, knn in enumerate((0.40, 0.41, 0.42)):
        job(folder / f"fedavg{seed}", "fedavg", seed, knn=knn)
    for seed, knn in enumerate((0.41, 0.43, 0.45, 0.90)):
        job(folder / f"eua{9 - seed}", "eua", seed, knn=knn)  # in another order of folders
    job(folder / "krum9", "krum", 9, knn=0.2)
    job(folder / "failed", "fedavg", 3, "failed")
    return folder


def test_differences_are_paired_over_common_seeds(runs: Path, tmp_path: Path, command):
    status, out, _ = command(runs, "--reference", "strategy=fedavg")
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("eua"))
    # As in test_significance.py: p = 0.0742 of a single row, interval 2 -+ 2.48, effect 2 / sqrt(pi).
    assert row.split(maxsplit=3)[1:3] == ["knn", "3"]
    assert row.split(maxsplit=3)[3] == "+2.0 ± 1.0  -0.5 to +4.5  0.074    +1.1                 10"
    assert "krum" not in out
    assert "1 of 2 rows have no reference with two seeds in common" in out
    assert "knn: 3.3 points with 3 seeds" in out
    command(runs, "--reference", "strategy=fedavg", "--out", tmp_path / "table.csv")
    table = pandas.read_csv(tmp_path / "table.csv")
    assert table.loc[0, ["strategy", "seeds", "difference"]].tolist() == ["eua", 3, pytest.approx(2.0)]


def test_results_without_percent_keep_their_digits_and_have_no_points(runs: Path, tmp_path: Path, command):
    for strategy, values in (("fedavg", (0.40, 0.41, 0.42)), ("eua", (0.41, 0.43, 0.45))):
        for folder in runs.glob(f"{strategy}*"):
            seed = int(read_summary(folder)["overrides"][1].removeprefix("seed="))
            final = {"federated": {"regression_r2": values[min(seed, 2)]}}
            change_summary(folder, final=final, units={"regression_r2": ""})
    _, out, _ = command(runs, "--reference", "strategy=fedavg", "--metrics", "regression_r2")
    row = next(line for line in out.splitlines() if line.startswith("eua"))
    assert row.split(maxsplit=3)[3] == "+0.02 ± 0.01  -0.00484 to +0.0448  0.074    +1.1                  -"
    assert "regression_r2: 0.033 with 3 seeds" in out
    command(runs, "--reference", "strategy=fedavg", "--metrics", "regression_r2", "--out", tmp_path / "table.csv")
    table = pandas.read_csv(tmp_path / "table.csv")
    assert table["seeds_for_1_point"].isna().all()


@pytest.mark.parametrize(("difference", "printed"), [(0.0, "+0.0 ± 0.0"), (-0.01, "-1.0 ± 0.0")])
def test_equal_differences_have_no_interval_and_no_power(tmp_path: Path, command, difference, printed):
    for seed in range(2):
        job(tmp_path / f"fedavg{seed}", "fedavg", seed, knn=0.4)
        job(tmp_path / f"eua{seed}", "eua", seed, knn=0.4 + difference)
    _, out, _ = command(tmp_path, "--reference", "strategy=fedavg")
    row = next(line for line in out.splitlines() if line.startswith("eua"))
    assert row.split(maxsplit=3)[3].split("  ")[0] == printed
    assert row.split()[6:] == ["-", "1.000" if difference == 0 else "0.500", "-", "-"]  # p of the sign test
    assert "are detected with probability" not in out
    for seed in range(2):
        job(tmp_path / f"krum{seed}", "krum", seed, knn=0.4 + 0.01 * seed)
    _, out, _ = command(tmp_path, "--reference", "strategy=fedavg")
    assert f"knn: {detectable(math.sqrt(0.5), seeds=2):.2g} points with 2 seeds" in out  # of krum alone: 0 and 1


def test_a_difference_that_rounds_to_zero_has_no_minus(tmp_path: Path, command):
    """2.8, -2.8 and -0.03 points have the mean -0.01."""
    for seed, difference in enumerate((0.028, -0.028, -0.0003)):
        job(tmp_path / f"fedavg{seed}", "fedavg", seed, knn=0.4)
        job(tmp_path / f"eua{seed}", "eua", seed, knn=0.4 + difference)
    _, out, _ = command(tmp_path, "--reference", "strategy=fedavg")
    row = next(line for line in out.splitlines() if line.startswith("eua"))
    assert row.split()[3:6] == ["+0.0", "±", "2.8"]
    assert "-0.0" not in row


def test_rows_are_compared_within_the_same_other_settings(runs: Path, command):
    for seed in range(3):
        folder = job(runs / f"byol{seed}", "fedavg", seed, knn=0.1)
        (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace('"rounds": 3', '"rounds": 9'))
    status, out, _ = command(runs, "--reference", "strategy=fedavg")
    assert status == 0
    assert "+2.0 ± 1.0" in out  # not those of nine rounds


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["strategy"], "--reference strategy is no setting and value; use e.g. --reference strategy=fedavg"),
        (["strategy=fedavgg"], "no finished run has strategy=fedavgg; strategy is "),
        (
            ["strategy=krum"],
            "eua has seeds 0, 1, 2, 3 and its reference 9, but two in common are needed; run the same ones of both, or "
            "choose another --reference than strategy=krum",
        ),
        (["method=byol"], "all finished runs have one method; add runs with another one, or choose another"),
        (["seed=0"], "--reference seed=0: rows are not compared by seed; use e.g. --reference strategy=fedavg"),
        (["strategy=fedavg", "--watch", "1"], "--reference compares runs that have ended; remove --paper and --watch"),
    ],
)
def test_bad_references_get_one_sentence(runs: Path, command, words, problem):
    status, _, error = command(runs, "--reference", *words)
    assert status == 2
    assert problem in error


def weigh(folder: Path, weight: float | None) -> None:
    """Set the weight of the regularizer, by an override unless it is null."""
    config = json.loads((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(json.dumps(config | {"regularizer": {"weight": weight}}))
    if weight is not None:
        change_summary(folder, overrides=[*read_summary(folder)["overrides"], f"regularizer.weight={weight}"])


def test_a_setting_that_only_one_has_is_no_difference(tmp_path: Path, command):
    """That of FedProx's regularizer, but not one that is null in the reference."""
    for seed in range(3):
        weigh(job(tmp_path / f"fedprox{seed}", "fedprox", seed, knn=0.5), 0.1)
        job(tmp_path / f"fedavg{seed}", "fedavg", seed, knn=0.4)
    status, out, _ = command(tmp_path, "--reference", "strategy=fedavg")
    assert status == 0
    assert "+10.0 ± 0.0" in out
    for seed in range(3):
        weigh(tmp_path / f"fedavg{seed}", None)
    status, _, error = command(tmp_path, "--reference", "strategy=fedavg")
    assert status == 2
    reason = "each row differs from the reference in other settings, at least in regularizer.weight (0.1 and null)"
    assert reason in error


def test_several_references_are_reported(runs: Path, command):
    """A row has the first reference whose other settings agree, and the table names what references differ in."""
    for seed in range(3):
        folder = job(runs / f"weighted{seed}", "fedavg", seed, knn=0.1)
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(text.replace('FedAvg"', 'FedAvg", "weighting": "examples"'))
        text = (folder / "summary.json").read_text()
        (folder / "summary.json").write_text(text.replace("seed=", 'strategy.weighting=examples", "seed='))
    status, out, _ = command(runs, "--reference", "strategy=fedavg")
    assert status == 0
    assert "+2.0 ± 1.0" in out
    assert "references differ in strategy.weighting; a row has the first one whose other settings agree" in out


def test_missing_references_are_explained(tmp_path: Path, command):
    for seed in range(2):
        job(tmp_path / f"fedavg{seed}", "fedavg", seed, "failed")
        job(tmp_path / f"eua{seed}", "eua", seed)
    _, _, error = command(tmp_path, "--reference", "strategy=fedavg")
    assert "no finished run has strategy=fedavg, and 2 with it failed or still run; strategy is eua" in error
