"""Masks beside their images, and those that a table names."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import torch
from pyarrow import csv

from fedssl.errors import InputError
from fedssl.evaluation.segmentation import read_masks
from tests.fedssl.evaluation.test_segmentation import subject_of, write


def test_a_name_without_suffix_comes_first(tmp_path: Path):
    """An image may be called 0_mask, and further masks of unused images do not matter."""
    subject = write(tmp_path)
    expected = read_masks(subject.test, str(tmp_path / "masks"))
    for name in ("0_mask", "unused_mask", "unused_mask_1"):
        (tmp_path / "masks" / "test" / f"{name}.png").write_bytes((tmp_path / "masks/test/1.png").read_bytes())
    assert torch.equal(read_masks(subject.test, str(tmp_path / "masks")), expected)


def test_masks_beside_their_images_have_a_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = read_masks(write(tmp_path).test, str(tmp_path / "masks"))
    for mask in (tmp_path / "masks").rglob("*.png"):
        mask.rename(tmp_path / "images" / mask.parent.name / f"{mask.stem}_mask.png")
    monkeypatch.chdir(tmp_path)
    subject, where = subject_of(Path("images")), "images"
    assert len(subject.test.images) == 6
    assert torch.equal(read_masks(subject.test, where), expected)
    first = tmp_path / "images" / "test" / "0_mask.png"
    copy = first.with_name("0_Mask_1.png")
    copy.write_bytes(first.read_bytes())
    with pytest.raises(InputError, match=r"0_Mask_1.png, .*0_mask.png are masks of one image; merge them into one"):
        read_masks(subject.test, where)
    for file in (first, copy):
        file.unlink()
    with pytest.raises(InputError, match=r"has no mask for 1 of 6 images"):  # the image is not its own mask
        read_masks(subject.test, where)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_column_of_a_table_names_masks(tmp_path: Path, ending: str) -> None:
    subject = write(tmp_path)
    rows = [
        {"image": f"images/{split}/{seed}.png", "mask": f"masks/{split}/{seed}.png", "split": split}
        for split in ("train", "test")
        for seed in range(6)
    ]
    table = pa.Table.from_pylist(rows)
    (csv.write_csv if ending == "csv" else pq.write_table)(table, tmp_path / f"list.{ending}")
    of_table = subject_of(tmp_path / f"list.{ending}")
    expected = read_masks(subject.train, str(tmp_path / "masks"))
    assert torch.equal(read_masks(of_table.train, "mask"), expected)


def test_a_missing_folder_of_masks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="evaluation.masks=/no/such is neither a folder nor a column; correct it"):
        read_masks(write(tmp_path).train, "/no/such")


def test_masks_of_files_with_several_images_are_refused(tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        for split in ("train", "test"):
            (tmp_path / kind / split).mkdir(parents=True)
            file = tmp_path / kind / split / "1.tif"
            tifffile.imwrite(file, np.zeros((3, 16, 16), np.uint8), photometric="minisblack")
    subject = subject_of(tmp_path / "images", pages="all")
    with pytest.raises(InputError, match="train/1.tif are masks of files with several images; save one image per file"):
        read_masks(subject.train, str(tmp_path / "masks"))
