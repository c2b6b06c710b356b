"""Columns of images: bytes, lists of bytes, structs and paths, in every storage."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedssl.datasets import base
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from tests.fedssl.datasets.made import first_pixels, make_image, png, settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")

PNGS = [png(make_image(1)), png(make_image(2)), png(make_image(3))]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(file: Path, **columns: pa.Array) -> None:
    contents = pa.table(columns)
    if file.suffix == ".parquet":
        return pq.write_table(contents, file)
    with pa.ipc.new_file(str(file), contents.schema) as writer:
        return writer.write_table(contents)


def pixels(folder: Path, **changes: object) -> list[int]:
    base.forget_images()
    data = load_federated(settings_of("cifar10", path=str(folder), size=4, label=None, cache=None, **changes))
    return first_pixels(data.images)


def columns(folder: Path) -> dict[str, pa.Array]:
    """Return columns with the images 1, 2 and 3, which are also files below the folder and elsewhere."""
    (folder / "images").mkdir()
    for number, content in enumerate(PNGS):
        (folder / "images" / f"{number}.png").write_bytes(content)
    relative, absolute = [f"images/{n}.png" for n in range(3)], [str(folder / "images" / f"{n}.png") for n in range(3)]
    return {
        "large": pa.array(PNGS, pa.large_binary()),
        "view": pa.array(PNGS, pa.binary_view()),
        "list": pa.array([list(content) for content in PNGS], pa.list_(pa.uint8())),
        "large list": pa.array([list(content) for content in PNGS], pa.large_list(pa.uint8())),
        "dictionary": pa.array(PNGS).dictionary_encode(),
        "strings": pa.array(relative),
        "large strings": pa.array(absolute, pa.large_string()),
        "dictionary of paths": pa.array(relative).dictionary_encode(),
        "paths": pa.array([{"bytes": None, "path": path} for path in absolute], STRUCT),
        "only paths": pa.array([{"path": path} for path in relative]),
        "only bytes": pa.array([{"bytes": content} for content in PNGS]),
        "mixed": pa.array(
            [{"bytes": PNGS[0], "path": "no"}, {"bytes": None, "path": relative[1]}, {"bytes": PNGS[2], "path": None}],
            STRUCT,
        ),
    }


def test_images_named_by_a_column_are_copied_and_dated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.datasets.cache.MIN_SECONDS_TO_CACHE", 0)
    (tmp_path / "data").mkdir()
    for name in ("only paths", "mixed"):
        folder = tmp_path / "data" / name
        folder.mkdir()
        write(folder / "train.parquet", img=columns(folder)[name])
        settings = settings_of("cifar10", path=str(folder), size=4, label=None, storage="encoded", cache=str(tmp_path))
        assert first_pixels(load_federated(settings).images) == [1, 2, 3]
        (folder / "images" / "1.png").write_bytes(png(make_image(9)))
        os.utime(folder / "images" / "1.png", ns=(1, 1))
        base.forget_images()
        assert first_pixels(load_federated(settings).images) == [1, 9, 3]


def test_columns_of_all_files_are_checked_before_decoding(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "train-0.parquet", img=pa.array(PNGS))
    write(tmp_path / "train-1.parquet", image=pa.array(PNGS))
    monkeypatch.setattr("fedssl.datasets.table_index.encoded_images", lambda *_: pytest.fail("decoded"))
    message = r"train-1\.parquet has no column 'img' .*; set dataset\.path to files of this data set only$"
    with pytest.raises(InputError, match=message):
        pixels(tmp_path)
