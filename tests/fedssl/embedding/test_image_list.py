"""Names, labels, groups and pixels of images in every kind of source, in blocks and after an interruption."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedssl.embedding.image_list import ImageList, list_images
from tests.fedssl.datasets.made import encoded


def listed(path: Path | str, *, channels: int = 1, **settings: Any) -> ImageList:
    return list_images(path, channels=channels, size=4, pixels={}, settings=settings)


def png(value: int) -> bytes:
    return encoded(Image.new("L", (4, 4), value))


def names(images: ImageList) -> list[str]:
    return [place.name for place in images.places(np.arange(len(images)))]


def values(images: ImageList, rows: list[int] | None = None) -> list[int]:
    """The first pixel of each image."""
    decoded = images.decode(np.arange(len(images)) if rows is None else np.array(rows))
    return [int(value) for value in decoded[:, 0, 0, 0]]


def test_samples_of_shards_are_named_by_their_keys(tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"s-{shard}.tar", "w") as archive:
            for number in range(2):
                for ending, content in (("png", png(10 * shard + number)), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"a/{number}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    images = listed(tmp_path, group="folder")
    assert names(images) == ["s-0.tar[a/0]", "s-0.tar[a/1]", "s-1.tar[a/0]", "s-1.tar[a/1]"]
    assert (images.labels.tolist(), images.groups(np.array([0, 3]))) == ([0, 1, 0, 1], ["a", "a"])
    assert (values(images), values(images, [1, 2])) == ([0, 1, 10, 11], [1, 10])


def test_rows_of_parquet_files_are_named_by_their_numbers(tmp_path: Path) -> None:
    for file in range(2):
        rows = {"image": [png(10 * file), png(10 * file + 1)], "label": ["a", None], "site": ["x", "y"]}
        pq.write_table(pa.table(rows), tmp_path / f"{file}.parquet")
    images = listed(tmp_path, group="site")
    assert names(images) == ["0.parquet[0]", "0.parquet[1]", "1.parquet[0]", "1.parquet[1]"]
    assert images.labels.tolist() == [0, -1, 0, -1]
    assert images.groups(np.array([1, 2])) == ["y", "x"]
    assert [block.images[:, 0, 0, 0].tolist() for block in images.blocks(3)] == [[0, 1, 10], [11]]
    assert [block.end for block in images.blocks(2, start=1)] == [3, 4]


def test_all_arrays_of_a_file_are_listed(tmp_path: Path) -> None:
    arrays = {"train_images": np.array([1, 2, 3]), "val_images": np.array([4]), "test_images": np.array([5, 6])}
    images = {name: np.broadcast_to(value[:, None, None], (len(value), 4, 4)) for name, value in arrays.items()}
    labels = {"train_labels": np.array([0, 1, 0]), "val_labels": np.array([1]), "test_labels": np.array([1, 0])}
    np.savez(tmp_path / "a.npz", **{name: array.astype(np.uint8) for name, array in (images | labels).items()})
    found = listed(tmp_path / "a.npz")
    listed_last = ["train_images, 2", "test_images, 0", "test_images, 1", "val_images, 0"]
    assert names(found)[2:] == [f"a.npz[{place}]" for place in listed_last]
    assert found.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert (values(found), values(found, [2, 4, 5])) == ([1, 2, 3, 5, 6, 4], [3, 6, 4])
    assert [block.images[:, 0, 0, 0].tolist() for block in found.blocks(2, start=1)] == [[2, 3], [5, 6], [4]]


@pytest.mark.parametrize("second", ["x_val", "x_unlabeled"])
def test_each_array_of_a_file_is_listed_once(tmp_path: Path, second: str) -> None:
    arrays = {"x_train": np.array([1, 2]), second: np.array([3])}
    images = {name: np.broadcast_to(value[:, None, None], (len(value), 4, 4)) for name, value in arrays.items()}
    np.savez(tmp_path / "a.npz", **{name: array.astype(np.uint8) for name, array in images.items()})
    assert values(listed(tmp_path / "a.npz")) == [1, 2, 3]


def test_images_of_several_archives_are_listed_once(tmp_path: Path) -> None:
    for number in range(2):
        images = np.full((2, 4, 4), number + 5, np.uint8)
        np.savez(tmp_path / f"{number}.npz", images=images, labels=np.array([number, 1]))
    found = listed(tmp_path)
    assert names(found) == [f"{number}.npz[images, {row}]" for number in range(2) for row in range(2)]
    assert found.labels is not None
    assert (found.labels.tolist(), values(found)) == ([0, 1, 1, 1], [5, 5, 6, 6])


def test_pages_are_named_by_their_numbers(tmp_path: Path) -> None:
    pages = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (7, 8)]
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    for file in ("cat/1.tif", "dog/2.tif"):
        pages[0].save(tmp_path / file, save_all=True, append_images=pages[1:])
    images = listed(tmp_path, pages="all")
    assert names(images) == ["cat/1.tif[0]", "cat/1.tif[1]", "dog/2.tif[0]", "dog/2.tif[1]"]
    assert images.groups(np.array([1, 2])) == ["cat/1.tif", "dog/2.tif"]
    assert [images.classes[label] for label in images.labels] == ["cat", "cat", "dog", "dog"]
    assert values(images) == [7, 8, 7, 8]


def test_images_in_bands_have_the_classes_of_folders(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / ("cat", "dog")[number % 2] / f"s{number}"
        folder.mkdir(parents=True)
        for band in (1, 2):
            Image.new("L", (4, 4), 10 * number + band).save(folder / f"B{band}.tif")
    images = listed(tmp_path, channels=2, pages="channels")
    assert [images.classes[label] for label in images.labels] == ["cat", "cat", "dog", "dog"]
    assert values(images) == [1, 21, 11, 31]
    assert listed(tmp_path / "cat", channels=2, pages="channels").labels is None  # each image would be a class


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_copies_in_lists_of_other_dtypes_are_equal(tmp_path: Path, dtype: str) -> None:
    Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(tmp_path / "1.png")
    Image.fromarray(np.arange(1, 257).reshape(16, 16).astype(np.uint8)).save(tmp_path / "2.png")
    blocks = [next(listed(tmp_path, dtype=name).blocks(2)) for name in ("auto", dtype)]
    assert [block.images.dtype for block in blocks] == ["uint8", dtype]
    assert blocks[0].digests() == blocks[1].digests()
    assert len({*blocks[0].digests()}) == 2


def test_digests_cover_files_and_settings(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png(1))
    first = listed(tmp_path).digest()
    assert listed(tmp_path).digest() == first
    assert listed(tmp_path, background=0).digest() != first
    (tmp_path / "2.png").write_bytes(png(1))
    assert listed(tmp_path).digest() != first


@pytest.mark.parametrize("label", [None, "species"])
def test_labels_can_be_of_another_column(tmp_path: Path, label: str | None) -> None:
    (tmp_path / "1.png").write_bytes(png(1))
    (tmp_path / "list.csv").write_text("path,label,species\n1.png,x,wolf\n")
    assert listed(tmp_path / "list.csv", label=label).classes == (() if label is None else ("wolf",))


def test_warnings_name_the_path_as_the_command_does(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.npz").touch()
    (warning,) = list_images(tmp_path, channels=3, size=8, pixels={}, settings={}, setting="labeled").warnings
    assert f"'labeled={tmp_path}/**/*.npz'" in warning


@pytest.mark.parametrize("file", ["a.png", "b/c.png", ".d/e.png", "b/./c.png", "b//c.png", "b/../c.png", "/other.png"])
def test_names_are_the_paths_below_the_folder_of_the_images(tmp_path: Path, file: str) -> None:
    expected = Path(file)
    found = ImageList(tmp_path, [], None, ())._below(f"{tmp_path}/{file}" if file[0] != "/" else file)
    assert found == expected.as_posix()
