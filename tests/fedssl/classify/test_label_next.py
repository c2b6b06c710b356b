"""Images to label next, and their tables."""

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.classify.cli import run as classify
from fedssl.classify.label_next import largest_cosines, next_to_label, typical, uncertain
from fedssl.embedding.embeddings import unit_features
from fedssl.errors import InputError
from tests.fedssl.classify.conftest import table, write, write_labels


def groups_of_images(sizes: list[int], *, spread: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Return unit features around orthogonal axes, and their axes."""
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    x = np.eye(16)[labels] + spread * generator.normal(size=(len(labels), 16))
    return unit_features(x.astype(np.float32), center=np.zeros(16)), labels


def test_first_images_are_those_of_different_groups_the_largest_first() -> None:
    x, labels = groups_of_images([40, 30, 20, 10], spread=0.05)
    chosen = next_to_label(x, x[:0], count=4, margins=None, seed=0)
    assert labels[chosen].tolist() == [0, 1, 2, 3]


def test_first_image_is_the_most_typical_of_its_cluster() -> None:
    x, _ = groups_of_images([30])
    first = next(typical(x, x[:0], count=1, seed=0))
    # Eq. 4 of the paper: the inverse mean distance to the 20 nearest neighbors, slowly.
    typicality = []
    for image in x.astype(np.float64):
        distances = sorted(np.sqrt(((image - other) ** 2).sum()) for other in x.astype(np.float64))
        typicality.append(1 / np.mean(distances[1:21]))
    assert first == int(np.argmax(typicality))


def test_groups_with_labeled_images_come_last() -> None:
    x, labels = groups_of_images([40, 20, 20], spread=0.05)
    known = np.flatnonzero(labels == 0)[:1]
    pool = np.setdiff1d(np.arange(80), known)
    chosen = next_to_label(x[pool], x[known], count=2, margins=None, seed=0)
    assert sorted(labels[pool[chosen]].tolist()) == [1, 2]


def test_near_duplicates_are_left_out() -> None:
    x, _ = groups_of_images([20, 20])
    copies = unit_features(x[:5, :16] + 1e-3, center=np.zeros(16))
    pool = np.concatenate([copies, x[5:10], x[5:10]])
    chosen = next_to_label(pool, x[:5], count=15, margins=None, seed=0)
    assert len(chosen) == 5
    assert {row % 5 for row in chosen} == set(range(5))
    assert min(chosen) >= 5
    assert next_to_label(copies, x[:5], count=3, margins=None, seed=0) == []


def test_uncertain_images_are_of_different_groups() -> None:
    x, labels = groups_of_images([50, 50], spread=0.05)
    margins = np.where(labels == 0, 0.1, 0.2) + np.arange(100) / 1e4
    margins[[60, 61]] = 0.01  # the most uncertain two are alike
    first = [row for row, _ in zip(uncertain(x, margins, count=2, seed=0), range(2), strict=False)]
    assert sorted(labels[first].tolist()) == [0, 1]
    ranked = list(uncertain(x, margins, count=2, seed=0))
    assert sorted(ranked) == list(range(100))
    assert margins[ranked[2:]].tolist() == sorted(margins[ranked[2:]])


def test_certain_images_are_not_chosen() -> None:
    x, _ = groups_of_images([100])
    margins = np.linspace(0, 1, 100)
    chosen = next_to_label(x, x[:0], count=3, margins=margins, seed=0)
    assert max(chosen) < 30


def test_more_images_than_there_are_give_all_once() -> None:
    x, _ = groups_of_images([7, 3])
    assert sorted(next_to_label(x, x[:0], count=50, margins=None, seed=0)) == list(range(10))


def test_cosines_equal_those_of_pairs() -> None:
    x, _ = groups_of_images([6, 6])
    groups = np.arange(12) // 2
    expected = [max(x[i] @ x[j] for j in range(12) if groups[i] != groups[j]) for i in range(12)]
    np.testing.assert_allclose(largest_cosines(x, x, groups=groups), expected, rtol=1e-5)
    assert largest_cosines(x, x[:0]).tolist() == [-1] * 12


@pytest.mark.parametrize("labeled", [True, False])
def test_images_to_label_next_are_labeled_once_written(run: Path, photos: Path, labeled: bool) -> None:
    known = ["labeled=photos/labeled"] * labeled
    text = classify([f"run={run}", *known, "images=photos", "label_next=6", "out=p.csv"][: None if labeled else -1])
    assert "images to label next: label_next.csv" in text
    lines = table("label_next.csv")
    assert len(lines) == 6
    assert ("prediction" in lines[0]) == labeled
    names = [Path(line["path"]).name for line in lines]
    assert not any(name.startswith("copy") for name in names) or not labeled
    assert labeled <= {*names}.isdisjoint(path.name for path in photos.glob("labeled/*/*"))
    assert labeled == text.endswith("once labeled, add them to photos/labeled")
    write_labels("label_next.csv")
    assert "6 labeled images of 3 classes" in classify([f"run={run}", "labeled=label_next.csv"])


def test_the_next_round_keeps_all_labels(run: Path, photos: Path) -> None:
    words = [f"run={run}", "images=photos", "label_next=6"]
    rounds = {"label_next.csv": 6, "label_next2.csv": 3, "label_next3.csv": 6}
    labeled, known, proposed = [], 0, set[str]()
    for number, (file, count) in enumerate(rounds.items()):
        text = classify([*words, *labeled, f"next={file}", f"out={number}.csv"][: None if labeled else -1])
        ((word, out),) = re.findall("once labeled, continue with '(.*)' and another next=( and another out=)?$", text)
        assert word == "labeled=label_next*.csv"
        assert bool(out) == bool(labeled)
        assert not labeled or f"{known} labeled images of " in text
        assert proposed.isdisjoint(line["path"] for line in table(file))
        write_labels(file, count=count)
        labeled, known = [word], known + count
        proposed |= {line["path"] for line in table(file) if line["label"]}
    assert "continue with 'labeled=7*.csv' and" in classify([*words, "next=7.csv"])
    text = classify([*words, "labeled=label_next.csv", "next=label_next4.csv", "out=3.csv"])
    assert "continue with 'labeled=label_next*.csv' and" in text
    with pytest.raises(InputError, match=r"^label_next\.csv exists already; choose another file with next=$"):
        classify([*words, *labeled, "out=4.csv"])


@pytest.mark.parametrize("folder", [None, "", "Doe, J", "{1} [2]", "a{b,c}"])
def test_labels_of_two_tables_are_used_together(run: Path, photos: Path, folder: str | None) -> None:
    below = Path("" if folder is None else photos.parent / folder)
    below.mkdir(exist_ok=True)
    labeled, proposed = below / "labels.csv", below / "label_next.csv"
    rows = [(path.absolute(), path.parent.name) for path in photos.glob("labeled/*/*.png")]
    with labeled.open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label"), *rows])
    words = [f"run={run}", "images=photos", "label_next=6"]
    text = classify([*words, f"labeled={labeled}", f"next={proposed}"])
    (quoted,) = re.findall("once labeled, continue with (.*) and another next= and another out=$", text)
    (both,) = shlex.split(quoted)
    write_labels(str(proposed))
    text = classify([*words, both, f"next={below / 'label_next2.csv'}", "out=p.csv"])
    assert "24 labeled images of 3 classes" in text
    assert text.endswith(f"once labeled, continue with {quoted} and another next= and another out=")


def test_names_that_no_table_can_hold_are_not_labeled_next(run: Path, photos: Path) -> None:
    words = [f"run={run}", "images=photos/new", "label_next=9"]
    for number, name in enumerate(("a\nb", "\x1b[2J", "\u202e", "\udcff", "b")):
        write(photos / "new" / f"{name}.png", "blue", seed=number)
    text = classify(words)
    assert "without 4 images whose names or folders have control characters or are not in UTF-8" in text
    assert [line["path"] for line in table("label_next.csv")] == ["./photos/new/b.png"]
    (photos / "new" / "b.png").unlink()
    with pytest.raises(InputError, match="without a label but 4 images whose names .*; rename these, or give others"):
        classify([*words, "next=n.csv"])


def test_fewer_images_to_label_next_have_a_reason(run: Path, photos: Path) -> None:
    words, reason = (
        [f"run={run}", "images=photos/new"],
        "near duplicates of these or of labeled ones (cosine from 0.99)",
    )
    pixels = np.array(Image.open("photos/green-6.png"))
    (photos / "new").mkdir()
    for number, file in enumerate(["new/0", "new/1", "new/2", "new/3", "labeled/green/near"]):
        Image.fromarray(np.maximum(pixels, number)).save(f"photos/{file}.png")
    write(photos / "new" / "other.png", "blue", seed=0)
    text = classify([*words, "label_next=4", "next=a.csv"])
    assert text.startswith(f"2 images to label next: a.csv; the others are {reason}; once labeled, ")
    assert classify([*words, "label_next=2", "next=b.csv"]).startswith("2 images to label next: b.csv; once labeled, ")
    (photos / "new" / "other.png").unlink()
    text = classify([*words, "labeled=photos/labeled", "label_next=3", "next=c.csv"])
    assert text.endswith(f"0 images to label next: c.csv; the others are {reason}")


def test_parts_of_files_have_no_labels_in_the_next_table(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "stack.npy", np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8))
    text = classify([f"run={run}", f"images={tmp_path / 'stack.npy'}", "label_next=2", f"next={tmp_path / 'n.csv'}"])
    assert text.endswith(
        "some are parts of files, or folders: write their labels beside the images, not into this table"
    )
    assert ".npy[" in (tmp_path / "n.csv").read_text()


def test_folders_of_bands_have_no_labels_in_the_next_table(run: Path, tmp_path: Path) -> None:
    scenes = tmp_path / "scenes"
    for number in range(3):
        (scenes / f"S{number}").mkdir(parents=True)
        for band in ("B02", "B03", "B04"):
            values = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(values).save(scenes / f"S{number}" / f"{band}.png")
    words = [f"run={run}", f"images={scenes}", "dataset.pages=channels", "label_next=2", f"next={tmp_path / 'n.csv'}"]
    text = classify(words)
    assert text.endswith(
        "some are parts of files, or folders: write their labels beside the images, not into this table"
    )
    assert re.fullmatch(r"path,label\n\./scenes/S.,\n\./scenes/S.,\n", (tmp_path / "n.csv").read_text())


def test_rows_without_a_label_are_labeled_next(run: Path, photos: Path) -> None:
    rows = [(path, path.name.rpartition("-")[0]) for path in photos.glob("labeled/*/*.png")]
    rows += [(path, " ") for path in photos.glob("[bgr]*.png")]
    with Path("labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label"), *rows])
    classify([f"run={run}", "labeled=labels.csv", "label_next=5"])
    assert {Path(line["path"]).parent.absolute() for line in table("label_next.csv")} == {photos}
