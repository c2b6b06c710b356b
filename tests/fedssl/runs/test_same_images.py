"""Paths of the same images make no rows of their own, and other images at one path do."""

import time
from pathlib import Path

import pytest
import yaml

from fedssl.plots.ranks import plot_critical_difference
from fedssl.report.accuracy_table import run_results
from fedssl.report.paired_table import paired_table
from fedssl.runs.catalog import rank_runs
from fedssl.runs.groups import group_by_seed
from fedssl.runs.run import Run, read_run
from fedssl.runs.same_images import images_by_run
from tests.runs import change_summary, write_run

SAME, OTHER = "24 files, 1,704 bytes, digest 0123456789abcdef", "24 files, 1,704 bytes, digest fedcba9876543210"


def job(
    folder: Path,
    path: str | None,
    *,
    seed: int,
    images: str | None = SAME,
    knn: float = 0.5,
    strategy: str = "fedavg",
) -> Run:
    words = [f"dataset.path={path}"] if path else []
    final = {"federated": {"knn": knn}}
    write_run(folder, [*words, f"seed={seed}", f"strategy={strategy}"], rounds=2, final=final)
    settings = {"seed": seed, "strategy": {"_target_": strategy}, "dataset": {"path": path, "size": 8}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if images is not None:
        (folder / "images.txt").write_text(f"{images}\n")
    return read_run(folder)


def runs_at(tmp_path: Path, *paths: str, **of_each: list) -> list[Run]:
    return [
        job(tmp_path / str(number), path, **{"seed": number} | {key: of_each[key][number] for key in of_each})
        for number, path in enumerate(paths)
    ]


def rows(runs: list[Run]) -> list[tuple[str, int]]:
    """Return the path in each row of the table, empty if it has none, and the number of runs; all groupings agree."""
    found = run_results(runs)
    groups = group_by_seed(runs)
    assert [len(group.runs) for group in groups] == [row.runs for row in found.rows]
    assert sorted(len(ranked.runs) for ranked in rank_runs(runs, "knn")) == sorted(row.runs for row in found.rows)
    return [(group.settings.get("dataset.path", ""), row.runs) for group, row in zip(groups, found.rows, strict=True)]


def test_the_same_images_at_several_paths_are_one_row(tmp_path: Path) -> None:
    runs = runs_at(tmp_path, "/home/a/../imgs", "/home/imgs", "/moved")
    assert rows(runs) == [("", 3)]
    assert "dataset.path" not in run_results(runs).table().header


def test_an_interrupted_run_is_no_sign_of_other_images(tmp_path: Path) -> None:
    """One that was stopped, whose images were moved, and which was then run again."""
    runs = runs_at(tmp_path, "/a", "/b", "/b", "/a", seed=[0, 1, 2, 1])
    change_summary(tmp_path / "3", status="interrupted", final=None)
    runs[3] = read_run(tmp_path / "3")
    assert [row.runs for row in run_results(runs).rows] == [3]


def test_names_are_the_first_path_of_the_same_images(tmp_path: Path) -> None:
    runs = runs_at(tmp_path, "/a", "/b", "/a", images=[SAME, SAME, OTHER])
    names = images_by_run(runs, lambda run: frozenset())
    assert list(names.values()) == [f"/a ({SAME})", f"/a ({SAME})", f"/a ({OTHER})"]


def test_other_images_at_one_path_are_another_row(tmp_path: Path) -> None:
    runs = runs_at(tmp_path, "/imgs", "/imgs", "/imgs", images=[SAME, OTHER, SAME])
    assert rows(runs) == [(f"/imgs ({SAME})", 2), (f"/imgs ({OTHER})", 1)]


def test_the_path_is_shown_where_images_differ(tmp_path: Path) -> None:
    runs = runs_at(tmp_path, "/a", "/b", "/moved", images=[SAME, OTHER, SAME])
    assert rows(runs) == [("/a", 2), ("/b", 1)]


def test_runs_without_a_description_are_compared_by_path(tmp_path: Path) -> None:
    runs = runs_at(tmp_path, "/a", "/b", "/b", "/moved", images=[None, None, SAME, SAME])
    assert rows(runs) == [("/a", 1), ("/b", 3)]
    (tmp_path / "2" / "images.txt").write_bytes(b"\xff")  # of another program
    assert rows(runs) == [("/a", 1), ("/b", 2), ("/moved", 1)]


def test_runs_without_a_path_are_not_split(tmp_path: Path) -> None:
    runs = [job(tmp_path / str(seed), None, seed=seed, images=(SAME, OTHER)[seed]) for seed in (0, 1)]
    assert rows(runs) == [("", 2)]


@pytest.mark.parametrize(("knn", "expected"), [([0.5, 0.6, 0.7], 2), ([0.5, 0.6, 0.5], 1)])
def test_files_alike_with_other_results_are_other_images(tmp_path: Path, knn: list[float], expected: int) -> None:
    """Arrays of one shape have the same size, and often the same name."""
    runs = runs_at(tmp_path, "/a/x.npy", "/a/x.npy", "/b/x.npy", seed=[0, 1, 0], knn=knn)
    assert len(rows(runs)) == expected


def test_moved_images_are_paired_and_ranked(tmp_path: Path) -> None:
    runs = [
        job(tmp_path / f"{name}{seed}", path, seed=seed, knn=0.1 * seed + 0.01 * number, strategy=name)
        for number, name in enumerate(("fedavg", "l_dawa", "m_dawa"))
        for seed, path in enumerate(("/a", "/b", "/b"))
    ]
    table = paired_table(runs, "strategy=fedavg")
    assert list(table.header[:3]) == ["strategy", "result", "seeds"]
    assert [row[2].text for row in table.rows] == ["3", "3"]
    _, *ranks = plot_critical_difference(runs).rows
    assert len(ranks) == 3


def test_a_thousand_runs_are_compared_in_seconds(tmp_path: Path) -> None:
    runs = runs_at(tmp_path, *(f"/{number % 3}" for number in range(1000)), seed=[*range(1000)])
    start = time.monotonic()
    group_by_seed(runs)
    assert time.monotonic() - start < 5
