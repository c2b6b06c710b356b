"""Which labeled images are joined in groups, and which contradict each other."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedssl.classify.labeled import LabeledImages, list_labeled, read_labeled
from fedssl.embedding import load_embedder
from fedssl.errors import InputError
from tests.fedssl.classify.conftest import write

COLOR = {"a": "green", "b": "blue"}


def labeled(run: Path, table: Path, **settings: Any) -> LabeledImages:
    embedder = load_embedder(run)
    return read_labeled(embedder, list_labeled(embedder, table, settings), settings, skip_unreadable=False)


def write_table(folder: Path, rows: Sequence[Sequence[str]], *columns: str) -> Path:
    with (folder / "list.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label", *columns), *rows])
    return folder / "list.csv"


def write_volume(file: Path, *, seed: int, blank: int | None = None) -> str:
    """Write a stack of three color pages, of which one may be black."""
    pages = np.random.default_rng(seed).integers(0, 256, (3, 11, 9, 3), dtype=np.uint8)
    if blank is not None:
        pages[blank] = 0
    np.save(file, pages)
    return file.name


def test_volumes_of_one_patient_are_one_group(run: Path, tmp_path: Path) -> None:
    names = [write_volume(tmp_path / f"{number}.npy", seed=number) for number in range(4)]
    rows = list(zip(names, "aabb", ("x", "x", "y", ""), ("k", "l", "l", "m"), strict=True))
    table = write_table(tmp_path, rows, "group", "site")
    assert labeled(run, table).groups.tolist() == [0] * 6 + [1] * 3 + [2] * 3
    assert labeled(run, table, group="site").groups.tolist() == [0] * 3 + [1] * 6 + [2] * 3


def test_an_empty_group_joins_no_images(run: Path, tmp_path: Path) -> None:
    rows = []
    for number, (name, group) in enumerate([("a", "p1"), ("a", ""), ("a", ""), ("b", "p1"), ("b", " "), ("b", "")]):
        write(tmp_path / f"{number}.png", COLOR[name], seed=number)
        rows.append((f"{number}.png", name, group))
    table = write_table(tmp_path, rows, "group")
    assert labeled(run, table).groups.tolist() == [0, 1, 2, 0, 3, 4]


def test_blank_pages_neither_join_volumes_nor_contradict(run: Path, tmp_path: Path) -> None:
    names = [write_volume(tmp_path / f"{number}.npy", seed=number, blank=number % 3) for number in range(4)]
    found = labeled(run, write_table(tmp_path, list(zip(names, "abab", strict=True))))
    assert found.groups.tolist() == [group for group in range(4) for _ in range(3)]


@pytest.mark.parametrize("blank", [False, True])
def test_copies_with_two_labels_are_refused(run: Path, tmp_path: Path, blank: bool) -> None:
    one = write_volume(tmp_path / "one.npy", seed=1)
    pages = np.load(tmp_path / "one.npy")
    np.save(tmp_path / "copy.npy", np.zeros_like(pages[0]) if blank else pages[[1]])
    np.save(tmp_path / "black.npy", np.zeros_like(pages[0]))
    table = write_table(tmp_path, [(one, "a"), ("black.npy", "a"), ("copy.npy", "b")])
    with pytest.raises(InputError, match="are the same image, but labeled 'a' and 'b'; remove the wrong one"):
        labeled(run, table)


def test_similar_names_of_classes_are_logged(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = []
    for number, name in enumerate(["01", "1", "10", "cat", "Cat "]):
        write(tmp_path / f"{number}.png", "green", seed=number)
        rows.append((f"{number}.png", name))
    labeled(run, write_table(tmp_path, rows))
    warnings = [line for line in caplog.messages if "count as 2 classes; write them alike if they are one" in line]
    assert len(warnings) == 2
    assert warnings[0].startswith("'01', '1' count")
