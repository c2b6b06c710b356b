"""Differences paired by seed: which runs are compared, and the numbers of the table."""

from pathlib import Path

import pandas
import pytest

from tests.fedssl.report.test_cli import job


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
    assert "knn: 3.3 points with 3 seeds" in out
    command(runs, "--reference", "strategy=fedavg", "--out", tmp_path / "table.csv")
    table = pandas.read_csv(tmp_path / "table.csv")
    assert table.loc[0, ["strategy", "seeds", "difference"]].tolist() == ["eua", 3, pytest.approx(2.0)]


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
        (["strategy=krum"], "no row has two seeds in common with a row of strategy=krum"),
        (["strategy=fedavg", "--watch", "1"], "--reference compares runs that have ended; remove --paper and --watch"),
    ],
)
def test_bad_references_get_one_sentence(runs: Path, command, words, problem):
    status, _, error = command(runs, "--reference", *words)
    assert status == 2
    assert problem in error
