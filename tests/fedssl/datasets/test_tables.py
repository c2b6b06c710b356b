"""Columns of images: bytes, lists of bytes, structs and paths, in every storage."""

import os
from pathlib import Path

import numpy as np
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
        "mixed": pa.array([{"bytes": PNGS[0], "path": "no"}, {"path": relative[1]}, {"bytes": PNGS[2]}], STRUCT),
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
    message = r"train-1\.parquet has no column 'img' .*; give files of this data set only$"
    with pytest.raises(InputError, match=message):
        pixels(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_arrays_as_datasets_writes_them(tmp_path: Path, kind: str) -> None:
    import datasets

    values = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    for name, feature, arrays in (
        ("channels last", datasets.Array3D(shape=(4, 4, 3), dtype="uint8"), values),
        ("channels first", datasets.Array3D(shape=(3, 4, 4), dtype="uint8"), values.transpose(0, 3, 1, 2)),
        ("gray", datasets.Array2D(shape=(4, 4), dtype="uint8"), values[..., 0]),
        ("lists", datasets.Sequence(datasets.Sequence(datasets.Value("uint8"))), values[..., 0]),
    ):
        features = datasets.Features({"pixels": feature, "label": datasets.Value("int64")})
        made = datasets.Dataset.from_dict({"pixels": arrays.tolist(), "label": [0, 1, 0]}, features=features)
        folder = tmp_path / name
        folder.mkdir()
        made.to_parquet(folder / "train.parquet") if kind == "parquet" else made.save_to_disk(folder / "train")
        expected = values if "channels" in name else np.repeat(values[..., :1], 3, axis=3)
        for storage in ("decoded", "encoded"):
            base.forget_images()
            changes = {"path": str(folder), "size": 4, "cache": None, "test_fraction": 0.0, "storage": storage}
            data = load_federated(settings_of("folder", **changes))
            assert np.array_equal(data.images[:], expected.transpose(0, 3, 1, 2)), name
            assert data.labels.tolist() == [0, 1, 0]


def test_arrays_of_other_shapes_are_unreadable(tmp_path: Path) -> None:
    column = pa.array([[[1, 2], [3, 4]], [[1, 2], [3]], None, [[1, None], [3, 4]]], pa.list_(pa.list_(pa.uint8())))
    write(tmp_path / "train.parquet", img=column)
    assert pixels(tmp_path) == [1]


def test_pointers_of_git_have_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(InputError, match="it is a pointer of Git LFS: fetch the file with git lfs pull"):
        load_federated(settings_of("folder", path=str(tmp_path)))
