"""Tables and figures from hand-made run folders."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from fedssl.report import draw_cosines, draw_metrics, format_table, sweep_table


def job(folder: Path, words: str, status: str = "finished", reason: str | None = None, **federated: float) -> Path:
    folder.mkdir()
    summary: dict[str, Any] = {"status": status, "reason": reason, "overrides": words.split(), "rounds": 2}
    if status == "finished":
        summary["final"] = {"untrained": {"knn": 0.1}, "federated": federated, "pixels": {"knn": 0.2}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


# --- encoders side by side ---


def test_format_table():
    table = format_table(
        {
            "untrained": {"linear_2_per_class": 0.5, "linear_2_per_class_std": 0.05, "knn": 0.6666},
            "federated": {"linear_2_per_class": 0.875, "linear_2_per_class_std": 0.0123, "knn": 1.0},
            "pixels": {"knn": 0.0},
        }
    )
    assert table.split("\n") == [
        "accuracy in %        untrained   federated  pixels",
        "linear_2_per_class  50.0 ± 5.0  87.5 ± 1.2       -",
        "knn                       66.7       100.0     0.0",
    ]


@pytest.mark.parametrize("results", [{}, {"federated": {}, "pixels": {}}])
def test_format_table_without_results_says_so(results: dict[str, dict[str, float]]):
    assert "nothing was evaluated" in format_table(results)


# --- sweeps ---


@pytest.fixture
def sweep(tmp_path: Path) -> list[Path]:
    return [
        job(
            tmp_path / "0", "strategy=fedavg partition.alpha=0.1 rounds=5 seed=0", knn=0.5, linear=0.6, linear_std=0.01
        ),
        job(
            tmp_path / "1", "strategy=fedavg partition.alpha=0.1 rounds=5 seed=1", knn=0.7, linear=0.6, linear_std=0.02
        ),
        job(tmp_path / "2", "strategy=l_dawa partition.alpha=0.1 rounds=5 seed=0", knn=0.8, linear=0.9),
        job(tmp_path / "3", "strategy=l_dawa partition.alpha=0.1 rounds=5 seed=1", "failed", "loss is\nNaN | stop"),
        job(tmp_path / "4", "strategy=m_dawa partition.alpha=0.1 rounds=5 seed=0", "interrupted"),
        tmp_path / "5",
    ]


def test_sweep_groups_by_everything_but_the_seed(sweep: list[Path]):
    table = sweep_table(sweep)
    assert table.keys == ["strategy"]  # the other settings do not vary
    assert table.metrics == ["knn", "linear"]
    assert [(row.settings["strategy"], row.runs, row.failed) for row in table.rows] == [
        ("fedavg", 2, 0),
        ("l_dawa", 1, 1),
        ("m_dawa", 0, 1),
    ]
    assert table.rows[0].metrics == {"knn": [0.5, 0.7], "linear": [0.6, 0.6]}
    assert table.failed == 3


def test_sweep_text(sweep: list[Path], tmp_path: Path):
    # Sample deviation of 0.5 and 0.7: sqrt(2 * 0.1^2 / 1) = 0.1414.
    assert sweep_table(sweep).text().split("\n") == [
        "strategy      knn (%)  linear (%)  runs  failed",
        "fedavg    60.0 ± 14.1  60.0 ± 0.0     2       0",
        "l_dawa           80.0        90.0     1       1",
        "m_dawa              -           -     0       1",
        "",
        "jobs that did not finish:",
        "",
        f"  {tmp_path / '3'} (strategy=l_dawa partition.alpha=0.1 rounds=5 seed=1): loss is NaN | stop",
        f"  {tmp_path / '4'} (strategy=m_dawa partition.alpha=0.1 rounds=5 seed=0): interrupted",
        f"  {tmp_path / '5'}: no readable summary.json, so it was ended from outside",
    ]


def test_sweep_csv_has_full_precision(sweep: list[Path], tmp_path: Path):
    sweep_table(sweep).write(tmp_path)
    with (tmp_path / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["strategy", "knn_mean", "knn_std", "linear_mean", "linear_std", "runs", "failed"]
    assert float(rows[0]["knn_mean"]) == pytest.approx(0.6, abs=1e-15)
    assert float(rows[0]["knn_std"]) == pytest.approx(np.std([0.5, 0.7], ddof=1), abs=1e-15)
    assert rows[1] == {
        "strategy": "l_dawa",
        "knn_mean": "0.8",
        "knn_std": "",
        "linear_mean": "0.9",
        "linear_std": "",
        "runs": "1",
        "failed": "1",
    }
    assert rows[2]["knn_mean"] == ""


def test_sweep_markdown(tmp_path: Path):
    folders = [
        job(tmp_path / "0", "strategy=fedavg,x|y seed=0", knn=0.5),
        job(tmp_path / "1", "strategy=l_dawa seed=0", "failed", "no GPU"),
    ]
    table = sweep_table(folders)
    table.write(tmp_path)
    assert (tmp_path / "results.md").read_text() == (
        "| strategy | knn (%) | runs | failed |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| fedavg,x\\|y | 50.0 | 1 | 0 |\n"
        "| l_dawa | - | 0 | 1 |\n"
        "\njobs that did not finish:\n\n"
        f"- {tmp_path / '1'} (strategy=l_dawa seed=0): no GPU\n"
    )


def test_sweep_over_seeds_only_is_one_row(tmp_path: Path):
    folders = [job(tmp_path / str(seed), f"rounds=2 seed={seed}", knn=0.1 * seed) for seed in (1, 2, 3)]
    table = sweep_table(folders)
    assert table.text() == "    knn (%)  runs  failed\n20.0 ± 10.0     3       0"
    assert table.failed == 0


def test_sweep_key_that_some_jobs_leave_at_its_default(tmp_path: Path):
    folders = [
        job(tmp_path / "0", "rounds=2", knn=0.5),
        job(tmp_path / "1", "+strategy.server_lr=0.5 rounds=2", knn=0.6),
        job(tmp_path / "2", "rounds=2 +strategy.server_lr=0.5 seed=3", knn=0.8),  # order does not matter
    ]
    table = sweep_table(folders)
    assert table.keys == ["strategy.server_lr"]
    assert [row.runs for row in table.rows] == [1, 2]
    assert table.text().split("\n")[1].split() == ["50.0", "1", "0"]


def test_sweep_in_which_nothing_was_evaluated_or_all_failed(tmp_path: Path):
    evaluated = sweep_table([job(tmp_path / "0", "strategy=fedavg"), job(tmp_path / "1", "strategy=l_dawa")])
    assert evaluated.text() == "strategy  runs  failed\nfedavg       1       0\nl_dawa       1       0"
    broken = tmp_path / "2"
    broken.mkdir()
    (broken / "summary.json").write_text('{"status": "fin')
    nothing = sweep_table([broken])
    assert nothing.failed == 1
    assert "no readable summary.json" in nothing.text()
    nothing.write(tmp_path)
    assert (tmp_path / "results.csv").read_text().split() == ["runs,failed"]


# --- figures ---


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is drawn: points by the label of their line, edges of the band."""
    calls: dict[str, Any] = {}
    plot, band = Axes.plot, Axes.fill_between

    def note_plot(axes: Axes, x: Any, y: Any, **style: Any) -> Any:
        calls[style["label"]] = [tuple(map(float, point)) for point in zip(x, y, strict=True)]
        return plot(axes, x, y, **style)

    def note_band(axes: Axes, x: Any, low: Any, high: Any, **style: Any) -> Any:
        calls["band"] = np.stack([low, high], axis=1).tolist()
        return band(axes, x, low, high, **style)

    monkeypatch.setattr(Axes, "plot", note_plot)
    monkeypatch.setattr(Axes, "fill_between", note_band)
    return calls


def is_png(file: Path | None) -> bool:
    return file is not None and file.read_bytes().startswith(b"\x89PNG")


def test_draw_metrics(tmp_path: Path, drawn: dict[str, Any]):
    few = {"linear_2_per_class": 0.5, "linear_2_per_class_std": 0.1}
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"round": 1, "loss": 4.0, "cosine": 0.9},
            {"round": 2, "loss": None, "cosine": 0.9, "evaluation": {"knn": 0.6, **few}},
            {"round": 3, "loss": 3.0, "cosine": 0.9},
            {"round": 4, "loss": 2.0, "cosine": 0.9, "evaluation": {"knn": 0.7}},
        ],
    )
    file = draw_metrics(tmp_path)
    assert file == tmp_path / "figures" / "metrics.png"
    assert is_png(file)
    assert drawn == {
        "loss": [(1, 4), (3, 3), (4, 2)],
        "knn": [(2, 0.6), (4, 0.7)],
        "linear_2_per_class": [(2, 0.5)],
    }


def test_draw_metrics_without_losses_or_without_anything(tmp_path: Path, drawn: dict[str, Any]):
    write_lines(tmp_path / "metrics.jsonl", [{"round": 1, "loss": None, "evaluation": {"knn": 0.5}}])
    assert is_png(draw_metrics(tmp_path))
    assert list(drawn) == ["knn"]
    other = tmp_path / "other"
    other.mkdir()
    write_lines(other / "metrics.jsonl", [{"round": 1, "loss": None}])
    assert draw_metrics(other) is None
    assert not (other / "figures").exists()


def test_draw_cosines(tmp_path: Path, drawn: dict[str, Any]):
    # Round 1: clients have means 0.8 and 0.6 over their layers: mean 0.7, standard deviation 0.1. Round 2: one client.
    write_lines(
        tmp_path / "clients.jsonl",
        [
            {"round": 1, "client": 0, "cosine": {"a": 0.9, "b": 0.7}},
            {"round": 1, "client": 3, "cosine": {"a": 0.6, "b": 0.6}},
            {"round": 2, "client": 1, "cosine": {"a": 1.0, "b": 0.5}},
            {"round": 2, "client": 2, "cosine": {}},
        ],
    )
    file = draw_cosines(tmp_path)
    assert file == tmp_path / "figures" / "cosines.png"
    assert is_png(file)
    np.testing.assert_allclose(drawn["mean over clients and layers"], [(1, 0.7), (2, 0.75)])
    np.testing.assert_allclose(drawn["band"], [[0.6, 0.8], [0.75, 0.75]])


def test_draw_cosines_without_cosines(tmp_path: Path):
    write_lines(tmp_path / "clients.jsonl", [{"round": 1, "client": 0, "cosine": {}}])
    assert draw_cosines(tmp_path) is None
