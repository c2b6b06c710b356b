"""`dataset.storage`: decoded and encoded images give the same data set, from every format, also after damage."""

import io
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedssl.datasets import base, cache, image_index, storage, stores, tables
from fedssl.datasets.base import ImageData
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.images import EncodedImages, MappedImages, TensorImages
from fedssl.errors import InputError
from simulation.run import run
from tests.cases import some
from tests.fedssl.datasets.made import settings_of
from tests.fedssl.datasets.test_cache import same
from tests.runs import read_lines


def copy_until_the_disk_is_full(tmp_path, monkeypatch) -> int:
    """Return the number of copied images by the note: three or four batches of seven, and no part of the fifth."""
    write(tmp_path / "data", "parquet")
    original, written = os.write, []

    def fill(descriptor: int, content: memoryview) -> int:
        written.append(len(content))
        if len(written) > 9:  # bytes and lengths of four batches, the first in two parts
            raise OSError(28, "No space left on device")
        return original(descriptor, content[: len(content) // 2] if len(written) == 1 else content)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "THREADS", 1)
        patch.setattr(stores.os, "write", fill)
        with pytest.raises(InputError, match=r"became full while .* were copied .* which continues the copy"):
            load(tmp_path / "data", "parquet", tmp_path / "cache", storage="encoded", test_fraction=0)
    done: int = json.loads((only(tmp_path / "cache") / "note.json").read_text())["done"]
    assert done == 28
    return done


FORMATS = ["folder", "parquet", "arrow stream", "arrow file", "large arrow", "compressed arrow"]
BAD = (0, 17, 40)  # no image, a truncated image, and no bytes (in a table)


@pytest.fixture(autouse=True)
def cache_all_data_sets(monkeypatch):
    monkeypatch.setattr(cache, "MIN_SECONDS_TO_CACHE", 0)
    monkeypatch.setattr(tables, "CHUNK", 7)
    base._read_split.cache_clear()


def jpegs() -> list[bytes | None]:
    """Sixty images of noise, four times as large as needed, of which three cannot be read."""
    random, made = np.random.default_rng(0), []
    for number in range(60):
        stream = io.BytesIO()
        shape = (100, 80, 3) if number % 3 else (70, 70)
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(stream, "JPEG")
        made.append(stream.getvalue())
    for index, content in zip(BAD, (b"no image", made[BAD[1]][:2000], None), strict=True):
        made[index] = content
    return made


def write(folder: Path, kind: str) -> None:
    """Write the images in two files of 40 and 20 rows, or as files of two classes."""
    folder.mkdir()
    images = jpegs()
    if kind == "folder":
        for number, content in enumerate(images):
            file = folder / f"class{number % 2}" / f"{number:02d}.jpg"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content or b"")
        return
    binary = pa.large_binary() if kind == "large arrow" else pa.binary()
    labels = [number % 10 for number in range(60)]
    for shard, part in enumerate((slice(0, 40), slice(40, 60))):
        structs = pa.array([{"bytes": image, "path": "x"} for image in images[part]], pa.struct({"bytes": binary}))
        table = pa.table({"img": structs, "label": labels[part], "who": [f"w{n % 3}" for n in labels[part]]})
        if kind == "parquet":
            pq.write_table(table, folder / f"train-{shard}.parquet", row_group_size=9)
            continue
        options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "compressed arrow" else None)
        open_writer = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
        with open_writer(folder / f"train-{shard}.arrow", table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=11)


def load(folder: Path, kind: str, location: Path | None, split: str = "federated", **changes: object) -> ImageData:
    """Read without the data sets that this process has loaded."""
    base._read_split.cache_clear()
    name, own = ("folder", {}) if kind == "folder" else ("cifar10", {"owner": "who"})
    settings = {
        "path": str(folder),
        "size": 20,
        "dtype": "uint8",
        "cache": location and str(location),
        "test_fraction": 0.2,
    }
    result = base.load_split(settings_of(name, **settings | own | changes), split)
    assert result is not None
    return result


def only(location: Path) -> Path:
    (folder,) = location.iterdir()
    return folder


@pytest.mark.parametrize(("cached", "limit"), [(False, None), (True, 37)])
@pytest.mark.parametrize("kind", some(FORMATS, default=("folder", "compressed arrow")))
def test_decoded_and_encoded_images_are_the_same_data_set(tmp_path, kind, cached, limit):
    write(tmp_path / "data", kind)
    location, unreadable = tmp_path / "cache" if cached else None, 0
    for split in ("federated", "test"):
        decoded = load(tmp_path / "data", kind, location, split, limit=limit, storage="decoded")
        assert isinstance(decoded.images, MappedImages if cached else TensorImages)
        for _ in range(2 if cached else 1):  # made, and read
            encoded = load(tmp_path / "data", kind, location, split, limit=limit, storage="encoded")
            assert isinstance(encoded.images, EncodedImages)
            assert same(decoded, encoded)
        unreadable += sum(int(warning.split()[0]) for warning in decoded.warnings)
    assert limit is not None or unreadable == len(BAD)


@pytest.mark.parametrize("kind", some(FORMATS, default=("folder", "compressed arrow")))
def test_images_are_copied_only_from_compressed_files(tmp_path, kind):
    write(tmp_path / "data", kind)
    load(tmp_path / "data", kind, tmp_path / "cache", storage="encoded")
    names = {file.name for file in only(tmp_path / "cache").iterdir()}
    assert names == {"lock", "about.npz"} | ({"pack"} if kind in ("parquet", "compressed arrow") else set())


@pytest.fixture
def reads(monkeypatch) -> list[object]:
    """Sources that are decoded while pixels or an index are made, and not for the batches of encoded images."""
    seen: list[object] = []
    original = Decoding.each

    def noted(source):
        if not threading.current_thread().name.startswith("decode"):
            seen.append(source)
        return source

    monkeypatch.setattr(Decoding, "each", lambda decoding, sources: original(decoding, map(noted, sources)))
    return seen


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("name", "damage"), [("pack", cut), ("pack", Path.unlink), ("about.npz", change)])
def test_a_damaged_index_is_made_again(tmp_path, reads, caplog, name, damage):
    write(tmp_path / "data", "parquet")
    whole = load(tmp_path / "data", "parquet", None, storage="decoded")
    load(tmp_path / "data", "parquet", tmp_path / "cache", storage="encoded")
    damage(only(tmp_path / "cache") / name)
    reads.clear()
    for number in (48, 0):  # 60 without a fifth
        assert same(load(tmp_path / "data", "parquet", tmp_path / "cache", storage="encoded"), whole)
        assert len(reads) == number
        reads.clear()
    assert ("is damaged" in caplog.text) == (damage is not Path.unlink)


@pytest.mark.parametrize("kind", ["folder", "arrow file"])
def test_a_source_cut_during_a_run_is_one_sentence(tmp_path, kind):
    write(tmp_path / "data", kind)
    images = load(tmp_path / "data", kind, None, storage="encoded", test_fraction=0).images
    for file in (tmp_path / "data").rglob("*.jpg" if kind == "folder" else "*.arrow"):
        cut(file)
    sentence = (
        r"image \d+ of the data set was readable and is no longer \(.*\); start again, and do not change the files"
    )
    with pytest.raises(InputError, match=sentence):
        images[:]


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_an_interrupted_index_is_continued(tmp_path, monkeypatch, reads, kind):
    write(tmp_path / "data", kind)
    expected = load(tmp_path / "data", kind, None, storage="decoded", test_fraction=0)
    original = Decoding.each
    reads.clear()

    def checked(source):
        if len(reads) >= 30:
            raise KeyboardInterrupt
        return source

    with monkeypatch.context() as patch:
        patch.setattr(storage, "THREADS", 1)
        patch.setattr(image_index, "BATCH", 7)
        patch.setattr(Decoding, "each", lambda decoding, sources: original(decoding, map(checked, sources)))
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path / "data", kind, tmp_path / "cache", storage="encoded", test_fraction=0)
    noted = json.loads((only(tmp_path / "cache") / "note.json").read_text())["done"]
    assert 23 <= noted <= 30
    reads.clear()
    assert same(load(tmp_path / "data", kind, tmp_path / "cache", storage="encoded", test_fraction=0), expected)
    assert len(reads) == 60 - noted
    assert {file.name for file in only(tmp_path / "cache").iterdir()} <= {"lock", "about.npz", "pack"}


NEEDED = 48 * 3 * 20 * 20


@pytest.mark.parametrize(
    ("memory", "disk", "encoded"),
    [
        (2 * NEEDED, 2 * NEEDED, ""),
        (2 * NEEDED - 1, 10**9, "memory"),
        (10**9, 2 * NEEDED - 1, "disk"),
        (None, 10**9, ""),
    ],
)
def test_auto_decodes_into_at_most_half_of_memory_and_disk(tmp_path, monkeypatch, caplog, memory, disk, encoded):
    write(tmp_path / "data", "folder")
    monkeypatch.setattr(cache, "available_memory", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk))
    caplog.set_level(logging.INFO)
    images = load(tmp_path / "data", "folder", tmp_path / "cache", storage="auto").images
    assert isinstance(images, EncodedImages if encoded else MappedImages)
    chosen = [line for line in caplog.messages if line.startswith("dataset.storage=auto: ")]
    assert [encoded in line and "0.1 MB, more than half of the" in line for line in chosen] == [True] * bool(encoded)


RUN = {
    "num_clients": 2,
    "rounds": 2,
    "local_epochs": 2,
    "batch_size": 8,
    "encoder.width": 4,
    "threads": 1,
    "seed": 3,
    "partition": "feature_clusters",
    "partition.min_size": 4,
    "calibration": "auxiliary",
    "evaluate_every": 1,
    "evaluation": "knn",
    "collapse_images": 10,
    "final_evaluation": "linear",
    "measure_resources": False,
}


@pytest.mark.parametrize("kind", ["folder", pytest.param("parquet", marks=pytest.mark.heavy)])
def test_a_run_has_the_same_results_with_both(tmp_path, kind):
    """Clients, calibration, evaluation, collapse metrics and figures: every recorded number, and the encoder."""
    write(tmp_path / "data", kind)
    name = "folder" if kind == "folder" else "cifar10"
    found = []
    for kept_as in ("decoded", "encoded"):
        folder = tmp_path / kept_as
        own = {"path": tmp_path / "data", "size": 16, "test_fraction": 0.3, "cache": tmp_path / "cache"}
        own = {f"dataset.{key}": value for key, value in {**own, "storage": kept_as}.items()}
        run([f"{key}={value}" for key, value in {"dataset": name, **own, **RUN, "output_dir": folder}.items()])
        lines = read_lines(folder / "metrics.jsonl")
        kept = [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]
        found.append((kept, (folder / "partition.csv").read_text(), (folder / "encoder.pt").read_bytes()))
    assert found[0] == found[1]


def test_a_slice_of_an_arrow_column_has_the_places_of_its_own_rows(tmp_path):
    """A record batch may share its buffers with others, and begin anywhere in them."""
    images = [bytes([number]) * (number + 1) for number in range(20)]
    table = pa.table({"img": pa.array(images)}).slice(5, 9)
    with pa.ipc.new_stream(tmp_path / "train.arrow", table.schema) as writer:
        writer.write_table(table)
    records = tables.arrow_records([tmp_path / "train.arrow"], "img", np.array([8, 0, 3]))
    assert list(records) == [images[13], images[5], images[8]]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_the_bounds_of_values_are_those_of_a_slice(kind):
    """Values of 1, 2, 3, ... bytes: the one with index i begins at 0 + 1 + ... + i = i (i + 1) / 2."""
    values = pa.array(["x" * (number + 1) for number in range(9)], kind).slice(3, 4)
    assert tables.value_bounds(values).tolist() == [6, 10, 15, 21, 28]
    assert tables.value_bounds(pa.array(["a path"])) is None


@pytest.mark.parametrize("lost", [None, "lengths", "partial"])
def test_a_copy_continues_when_the_disk_has_room(tmp_path, monkeypatch, reads, lost):
    done = copy_until_the_disk_is_full(tmp_path, monkeypatch)
    if lost is not None:
        cut(only(tmp_path / "cache") / lost)
        done = 0
    expected = load(tmp_path / "data", "parquet", None, storage="decoded", test_fraction=0)
    reads.clear()
    assert same(load(tmp_path / "data", "parquet", tmp_path / "cache", storage="encoded", test_fraction=0), expected)
    assert len(reads) == 60 - done


def test_free_disk_space_is_checked_before_the_copy(tmp_path, monkeypatch, reads):
    write(tmp_path / "data", "parquet")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100_000))  # 0.3 MB are needed
    sentence = r"no room for a copy of the encoded images: it needs .* and 0\.1 MB are free; .*dataset\.cache=FOLDER"
    with pytest.raises(InputError, match=sentence):
        load(tmp_path / "data", "parquet", tmp_path / "cache", storage="encoded")
    assert not reads
