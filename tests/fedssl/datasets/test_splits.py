"""Splits with names of their own: what is held out, and of which images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedssl.datasets import base
from fedssl.datasets.base import load_split
from fedssl.errors import InputError
from tests.fedssl.datasets.made import first_pixels, make_image, png, settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")

TRAIN, OTHER = range(8), range(100, 104)  # first pixels of images of two classes


def write_parquet(folder: Path, splits: Mapping[str, Sequence[int]]) -> Path:
    for name, values in splits.items():
        columns = {"image": [png(make_image(value)) for value in values], "label": [value % 2 for value in values]}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


def write_column(folder: Path, splits: Mapping[str, Sequence[int]]) -> Path:
    rows = [(value, name) for name, values in splits.items() for value in values]
    for value, _ in rows:
        (folder / f"{value}.png").write_bytes(png(make_image(value)))
    lines = (f"{value}.png,{value % 2},{name}\n" for value, name in rows)
    (folder / "list.csv").write_text("path,label,split\n" + "".join(lines))
    return folder / "list.csv"


def write_arrays(folder: Path, splits: Mapping[str, Sequence[int]]) -> Path:
    arrays = {}
    for name, values in splits.items():
        arrays[name] = np.stack([np.full((4, 4, 3), value, np.uint8) for value in values])
        arrays[name.replace("x_", "y_")] = np.array(values) % 2
    np.savez(folder / "arrays.npz", **arrays)
    return folder / "arrays.npz"


def write_folders(folder: Path, splits: Mapping[str, Sequence[int]]) -> Path:
    for name, values in splits.items():
        for value in values:
            (folder / name / f"class {value % 2}").mkdir(parents=True, exist_ok=True)
            (folder / name / f"class {value % 2}" / f"{value:03}.png").write_bytes(png(make_image(value)))
    return folder


def read(path: Path, train: str, test: str | None, **changes: object) -> list[set[int]]:
    base.forget_images()
    splits = {"federated": train, "train": train, "test": test}
    settings = {"path": str(path), "size": 4, "cache": None, "test_fraction": 0.25, "splits": splits}
    data = settings_of("folder", **settings | changes)
    found = [load_split(data, split) for split in ("federated", "test")]
    return [set() if part is None else {*first_pixels(part.images)} for part in found]


@pytest.mark.parametrize(
    ("write", "name"), [(write_parquet, "train_0"), (write_column, "train a"), (write_arrays, "x_train")]
)
def test_the_share_for_the_test_is_not_trained_on(tmp_path: Path, write, name: str) -> None:
    train, test = read(write(tmp_path, {name: TRAIN}), name, "test")
    assert (len(train), len(test), train | test) == (6, 2, {*TRAIN})


@pytest.mark.parametrize(
    ("write", "train", "test", "settings"),
    [
        (write_parquet, "train", "holdout", {}),
        (write_column, "train", "holdout", {}),
        (write_column, "0", "1", {}),
        (write_arrays, "x_train", "x_holdout", {}),
        (write_folders, "train", "holdout", {"split_folders": True}),
    ],
)
def test_a_test_with_its_own_name_needs_no_share(tmp_path: Path, write, train, test, settings) -> None:
    path = write(tmp_path, {train: TRAIN, test: OTHER})
    assert read(path, train, test, **settings) == [{*TRAIN}, {*OTHER}]
    assert read(path, train, None, **settings) == [{*TRAIN}, set()]


@pytest.mark.parametrize("write", [write_parquet, write_column, write_folders])
def test_training_images_are_no_test_without_a_share(tmp_path: Path, write) -> None:
    path = write(tmp_path, {"train": TRAIN})
    assert read(path, "train", "test", split_folders=False, test_fraction=0.0) == [{*TRAIN}, set()]


@pytest.mark.parametrize("names", [("train_0", "train_1"), ("cats", "dogs")])
def test_a_share_is_of_the_images_that_are_trained_on(tmp_path: Path, names: tuple[str, str]) -> None:
    path = write_parquet(tmp_path, dict(zip(names, (TRAIN, OTHER), strict=True)))
    with pytest.raises(InputError, match=rf"names '{names[0]}', but .* all of .*; set dataset\.test_fraction=0"):
        read(path, names[0], "test")
    assert read(path, names[0], "test", test_fraction=0.0) == [{*TRAIN}, set()]
