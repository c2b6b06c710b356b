"""Which runs the figures of the page are drawn of, and when anew."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedssl.report import page_figures
from fedssl.report.page_figures import figures_of_all, figures_of_each
from fedssl.runs.run import Run, find_runs
from tests.fedssl.report.test_html_page import job


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two seeds of a rule, of which the first goes on; one of another, which failed; one of a third, which goes on."""
    for name, overrides in {"a": ("seed=0",), "b": ("seed=1",), "d": ("strategy=eua",)}.items():
        job(tmp_path / name, *overrides)
    job(tmp_path / "c", "strategy=fedavg", status="failed", reason="none delivered")
    found = {run.folder.name: run for run in find_runs([tmp_path])}
    going = {name: replace(found[name], running=True, summary=None) for name in ("a", "d")}
    return list((found | going).values())


def names(captions: list[str]) -> list[str]:
    return list(dict.fromkeys(Path(caption.partition(":")[0]).name for caption in captions))


def test_a_figure_of_all_has_what_finished_and_what_goes_on_where_nothing_has(runs, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(page_figures, "accuracies", lambda runs: shown.extend(run.folder.name for run in runs))
    assert figures_of_all(runs) == []
    assert sorted(shown) == ["b", "d"]


def test_each_row_has_the_figures_of_one_run_that_finished_if_one_has(runs):
    assert names([caption for caption, _ in figures_of_each(runs)]) == ["b", "d"]


def test_a_figure_is_drawn_anew_only_when_its_file_has_changed(runs, monkeypatch):
    page_figures._DRAWN.clear()
    drawn: list[Path] = []

    def draw(folder: Path) -> None:
        drawn.append(folder)

    monkeypatch.setattr(page_figures, "OF_EACH", (("loss", draw, "metrics.jsonl"), ("nothing", draw, "missing.csv")))
    folder = next(run.folder for run in runs if run.folder.name == "b")
    for _ in range(2):
        assert figures_of_each([run for run in runs if run.folder == folder]) == []
    assert drawn == [folder]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    figures_of_each([run for run in runs if run.folder == folder])
    assert drawn == [folder, folder]
