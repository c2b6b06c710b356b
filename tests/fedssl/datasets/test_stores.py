"""`dataset.storage`: decoded and encoded images give the same data set, from every format, also after damage."""

import json
import shutil
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from fedssl.datasets import image_index, storage, stores, tables
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.images import EncodedImages, MappedImages, TensorImages
from fedssl.errors import InputError
from simulation.run import run
from tests.cases import some
from tests.fedssl.datasets.stored import BAD, cut, flip, load, only, same, write
from tests.runs import read_lines

pytestmark = pytest.mark.usefixtures("cache_all_data_sets")

FORMATS = ["folder", "parquet", "arrow stream", "arrow file", "large arrow", "compressed arrow"]
DEFAULT = ("folder", "compressed arrow")


@pytest.mark.parametrize(("cached", "limit"), [(False, None), (True, 37)])
@pytest.mark.parametrize("kind", some(FORMATS, default=DEFAULT))
def test_decoded_and_encoded_images_are_the_same_data_set(tmp_path, reads, kind, cached, limit):
    write(tmp_path / "data", kind)
    location, unreadable = tmp_path / "cache" if cached else None, 0
    for split in ("federated", "test"):
        plain = load(tmp_path / "data", kind, None, split, limit=limit, storage="decoded")
        for kept_as, form in (("decoded", MappedImages if cached else TensorImages), ("encoded", EncodedImages)):
            for number in range(2 if cached else 1):  # made, and read
                reads.clear()
                found = load(tmp_path / "data", kind, location, split, limit=limit, storage=kept_as)
                assert (isinstance(found.images, form), bool(reads)) == (True, number == 0)
                assert same(found, plain)
        unreadable += sum(int(warning.split()[0]) for warning in plain.warnings)
    assert limit is not None or unreadable == len(BAD)


@pytest.mark.parametrize("kind", some(FORMATS, default=DEFAULT))
def test_images_are_copied_only_from_compressed_files(tmp_path, kind):
    write(tmp_path / "data", kind)
    for kept_as in ("decoded", "encoded"):
        load(tmp_path / "data", kind, tmp_path / kept_as, storage=kept_as)
        names = {file.name for file in only(tmp_path / kept_as).iterdir()}
        content = {"pixels"} if kept_as == "decoded" else {"pack"} if kind in ("parquet", "compressed arrow") else set()
        assert names == {"lock", "about.npz"} | content


@pytest.mark.parametrize("damage", [cut, Path.unlink, flip])
@pytest.mark.parametrize(("kind", "kept_as", "name"), [("folder", "decoded", "pixels"), ("parquet", "encoded", "pack")])
def test_what_is_damaged_is_made_again(tmp_path, reads, caplog, kind, kept_as, name, damage):
    write(tmp_path / "data", kind)
    whole = load(tmp_path / "data", kind, None, storage="decoded")
    load(tmp_path / "data", kind, tmp_path / "cache", storage=kept_as)
    damage(only(tmp_path / "cache") / ("about.npz" if damage is flip else name))
    for number in (48, 0):  # 60 without a fifth
        reads.clear()
        assert same(load(tmp_path / "data", kind, tmp_path / "cache", storage=kept_as), whole)
        assert len(reads) == number
    assert ("is damaged" in caplog.text) == (damage is not Path.unlink)


@pytest.mark.parametrize(
    ("kind", "damage", "share"), [("folder", cut, 0.5), ("arrow file", cut, 0.5), ("arrow file", flip, 0)]
)
def test_a_source_changed_during_a_run_is_one_sentence(tmp_path, monkeypatch, kind, damage, share):
    monkeypatch.setattr(image_index, "_OPEN_SHARE", share)
    write(tmp_path / "data", kind)
    images = load(tmp_path / "data", kind, None, storage="encoded", test_fraction=0).images
    for file in (tmp_path / "data").rglob("*.jpg" if kind == "folder" else "*.arrow"):
        damage(file)
    sentence = (
        r"image \d+ of the data set was readable and is no longer \(.*\); start again, and do not change the files"
    )
    with pytest.raises(InputError, match=sentence):
        images[:]


@pytest.mark.parametrize(
    ("kind", "kept_as", "note"),
    [
        ("folder", "decoded", "whole"),
        ("folder", "decoded", "damaged"),
        ("folder", "encoded", "whole"),
        ("parquet", "encoded", "whole"),
    ],
)
def test_what_was_interrupted_is_continued(tmp_path, monkeypatch, reads, kind, kept_as, note):
    write(tmp_path / "data", kind)
    expected = load(tmp_path / "data", kind, None, storage="decoded", test_fraction=0)
    original = Decoding.each
    reads.clear()

    def checked(source):
        if len(reads) >= 30:
            raise KeyboardInterrupt
        return source

    with monkeypatch.context() as patch:
        patch.setattr(storage, "THREADS", 1)  # with several, one that sleeps may hold the count back
        patch.setattr(image_index, "BATCH", 7)
        patch.setattr(Decoding, "each", lambda decoding, sources: original(decoding, map(checked, sources)))
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path / "data", kind, tmp_path / "cache", storage=kept_as, test_fraction=0)
    file = only(tmp_path / "cache") / "note.json"
    noted = json.loads(file.read_text())["done"]
    assert 23 <= noted <= 30  # without the batch that was begun
    if note == "damaged":
        file.write_text("{")
        noted = 0
    reads.clear()
    assert same(load(tmp_path / "data", kind, tmp_path / "cache", storage=kept_as, test_fraction=0), expected)
    assert len(reads) == 60 - noted
    assert {file.name for file in only(tmp_path / "cache").iterdir()} <= {"lock", "about.npz", "pack", "pixels"}


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


def test_a_sliced_arrow_column_has_the_places_of_its_rows(tmp_path):
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


def copy_until_the_disk_is_full(tmp_path, monkeypatch) -> int:
    """Return the number of copied images by the note: three or four batches of seven, and no part of the fifth."""
    write(tmp_path / "data", "parquet")
    written = []

    class Full(FileIO):
        def write(self, content: memoryview) -> int:
            written.append(len(content))
            if len(written) > 9:  # bytes and lengths of four batches, the first in two parts
                raise OSError(28, "No space left on device")
            return super().write(content[: len(content) // 2] if len(written) == 1 else content)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "THREADS", 1)
        patch.setattr(stores, "_append_after", lambda file, size: Full(file, "ab"))
        with pytest.raises(InputError, match=r"became full while .* were copied .* which continues the copy"):
            load(tmp_path / "data", "parquet", tmp_path / "cache", storage="encoded", test_fraction=0)
    done: int = json.loads((only(tmp_path / "cache") / "note.json").read_text())["done"]
    assert done == 28
    return done


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
