"""Cache of decoded images: the same bits, decoded once, also after interruptions."""

import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from fedssl.config.load import read_data
from fedssl.config.settings import DataSettings
from fedssl.datasets import base, cache, image_index, storage, stores
from fedssl.datasets.base import ImageData, load_split
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.image_index import SequenceIndex
from fedssl.errors import InputError

CONF = Path(__file__).parents[3] / "conf" / "dataset"


@pytest.fixture(autouse=True)
def cache_all_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_SECONDS_TO_CACHE", 0)
    base._read_split.cache_clear()


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Sixty images of noise in two classes, three of which cannot be read."""
    random = np.random.default_rng(0)
    for number in range(60):
        file = tmp_path / "images" / f"class{number % 2}" / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
        if number in (0, 17, 40):
            file.write_bytes(b"no image")
    return tmp_path / "images"


def settings(name: str, **changes: object) -> DataSettings:
    node = OmegaConf.merge(OmegaConf.load(CONF / f"{name}.yaml"), changes)
    return read_data(node)


def folder_of(images: Path, location: Path | None, **changes: object) -> DataSettings:
    return settings("folder", path=str(images), size=8, dtype="uint8", cache=location and str(location), **changes)


def read(data: DataSettings, split: str = "federated") -> ImageData:
    """Read without the data sets that this process has loaded."""
    base._read_split.cache_clear()
    result = load_split(data, split)
    assert result is not None
    return result


def same(one: ImageData, other: ImageData) -> bool:
    columns = ((one.images[:], other.images[:]), (one.labels, other.labels), (one.owners, other.owners))
    names = (one.classes, one.owner_names, one.warnings) == (other.classes, other.owner_names, other.warnings)
    return names and all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in columns)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record of the decoded sources, in any order."""
    seen: list[object] = []
    original = Decoding.each

    def noted(source: object) -> object:
        seen.append(source)
        return source

    monkeypatch.setattr(Decoding, "each", lambda decoding, sources: original(decoding, map(noted, sources)))
    return seen


def only(location: Path) -> Path:
    (folder,) = location.iterdir()
    return folder


def test_a_folder_has_equal_bits_with_a_cache(images, location, decoded):
    without = read(folder_of(images, None))
    assert not location.exists()
    first = read(folder_of(images, location))
    assert len(decoded) == 2 * len(without.images) + 2 * 2  # a fifth of the 60, and one of the bad ones, is held out
    again = read(folder_of(images, location))
    assert len(decoded) == 2 * len(without.images) + 2 * 2
    assert same(first, without)
    assert same(again, without)
    assert again.classes == ("class0", "class1")
    assert {file.name for file in only(location).iterdir()} == {"lock", "pixels", "about.npz"}
    assert only(location).name.startswith("images-train-8px-")


def test_parquet_files_have_equal_bits_with_a_cache(tmp_path, location, decoded):
    random = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for shard in range(2):
        rows = []
        for _ in range(25):
            png = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(png, "PNG")
            rows.append(png.getvalue())
        columns = {"img": rows, "label": random.integers(0, 10, 25), "who": [f"w{i % 3}" for i in range(25)]}
        pq.write_table(pa.table(columns), tmp_path / "data" / f"train-{shard}.parquet")
    changes = {"path": str(tmp_path / "data"), "size": 8, "owner": "who", "test_fraction": 0.2}
    for split in ("federated", "test"):
        without = read(settings("cifar10", cache=None, **changes), split)
        first = read(settings("cifar10", cache=str(location), **changes), split)
        number = len(decoded)
        assert same(first, without)
        assert same(read(settings("cifar10", cache=str(location), **changes), split), without)
        assert len(decoded) == number
    assert len(list(location.iterdir())) == 2


def test_the_cache_key_covers_all_that_pixels_depend_on(images, location, decoded, monkeypatch):
    def number(**changes: object) -> int:
        before = len(decoded)
        read(folder_of(images, location, **changes))
        return len(decoded) - before

    assert number()
    for changes in ({"channels": 1, "mean": [0.5], "std": [0.5]}, {"limit": 20}, {"test_fraction": 0}):
        assert number(**changes)
        assert not number(**changes)
    assert not number()
    file = images / "class0" / "02.png"
    os.utime(file, ns=(0, 0))  # written anew, with an image of the same size
    assert number()
    assert not number()
    (images / "class2").mkdir()
    Image.new("RGB", (8, 8)).save(images / "class2" / "61.png")
    assert number()
    monkeypatch.setattr(cache, "VERSION", 0)
    assert number()


def cut(folder: Path, name: str) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size // 2)


def flip(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


def lose(folder: Path, name: str) -> None:
    (folder / name).unlink()


@pytest.mark.parametrize(("name", "damage"), [("pixels", cut), ("pixels", lose), ("about.npz", flip)])
def test_a_damaged_file_is_made_again(images, location, decoded, caplog, damage, name):
    whole = read(folder_of(images, None))
    read(folder_of(images, location))
    number = len(decoded) // 2
    damage(only(location), name)
    assert same(read(folder_of(images, location)), whole)
    assert len(decoded) == 3 * number
    assert ("is damaged" in caplog.text) == (damage is not lose)
    assert same(read(folder_of(images, location)), whole)
    assert len(decoded) == 3 * number


CHILD = """
import sys, time
from pathlib import Path
from fedssl.datasets import cache, folder, image_index, storage
from fedssl.datasets.decoding import Decoding
cache.MIN_SECONDS_TO_CACHE, image_index.BATCH = 0, 2
storage.DECODE_LOG_INTERVAL, storage.THREADS = 0.01, 2
original = Decoding.each
def slow(source):
    time.sleep({pause})
    with open("{log}", "a") as log:
        log.write(f"{{source}}\\n")
    return source
Decoding.each = lambda decoding, sources: original(decoding, map(slow, sources))
form = dict(channels=3, size=8, limit=None, test_fraction=0)
import hashlib
for location in sys.argv[1:]:
    images = folder.read("train", path="{images}", cache=location, **form)
    print(hashlib.sha256(images.images[:].numpy().tobytes()).hexdigest(), images.labels.sum().item(), flush=True)
"""


def start(images: Path, *locations: Path, log: Path, pause: float) -> subprocess.Popen[str]:
    """Start a process that decodes the images into each location."""
    code = CHILD.format(images=images, log=log, pause=pause)
    return subprocess.Popen([sys.executable, "-c", code, *locations], stdout=subprocess.PIPE, text=True)


def wait_for(condition, *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def done(location: Path) -> int:
    """Number of decoded images by the note."""
    notes = list(location.glob("*/note.json"))
    return json.loads(notes[0].read_text())["done"] if notes else 0


def digest(images: ImageData) -> str:
    return f"{hashlib.sha256(images.images[:].numpy().tobytes()).hexdigest()} {images.labels.sum().item()}"


@pytest.mark.heavy
@pytest.mark.slow
def test_a_waiting_process_resumes_the_decoding_of_a_dead_one(images, tmp_path, decoded, caplog):
    log, locations = tmp_path / "log", (tmp_path / "first", tmp_path / "second")
    expected = digest(read(folder_of(images, None, test_fraction=0)))
    decoded.clear()
    caplog.set_level(logging.INFO)
    other = start(images, *locations, log=log, pause=0.05)

    wait_for(lambda: done(locations[0]) >= 10)
    assert digest(read(folder_of(images, locations[0], test_fraction=0))) == expected
    assert "another process decodes the images of" in caplog.text
    assert other.stdout.readline().strip() == expected
    assert decoded == []

    caplog.clear()

    def kill() -> tuple[int, int]:
        """Return the numbers of images that were decoded there and here."""
        wait_for(lambda: done(locations[1]) >= 30)
        other.send_signal(signal.SIGSTOP)
        wait_for(lambda: "another process decodes the images of" in caplog.text)
        numbers = done(locations[1]), len(decoded)
        other.kill()
        other.wait()
        return numbers

    with ThreadPoolExecutor(1) as pool:
        numbers = pool.submit(kill)
        assert digest(read(folder_of(images, locations[1], test_fraction=0))) == expected
    there, here = numbers.result()
    assert here == 0
    assert len(decoded) == 60 - there
    assert len(log.read_text().splitlines()) >= 60 + there


def stop_after(number: int, monkeypatch: pytest.MonkeyPatch, seen: list[object]) -> None:
    """Raise KeyboardInterrupt in a decoding thread after ``number`` further images."""
    original, end = Decoding.each, len(seen) + number

    def checked(source: object) -> object:
        if len(seen) >= end:
            raise KeyboardInterrupt
        return source

    monkeypatch.setattr(Decoding, "each", lambda decoding, sources: original(decoding, map(checked, sources)))


@pytest.mark.parametrize("note", ["whole", "damaged"])
def test_interrupted_decoding_resumes(images, location, decoded, note):
    expected = read(folder_of(images, None, test_fraction=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_index, "BATCH", 2)
        patch.setattr(storage, "THREADS", 1)  # with several, one that sleeps may hold the count back
        stop_after(30, patch, decoded)
        with pytest.raises(KeyboardInterrupt):
            read(folder_of(images, location, test_fraction=0))
    noted, number = done(location), len(decoded)
    assert 28 <= noted <= 30  # without the batch that was begun
    if note == "damaged":
        (only(location) / "note.json").write_text("{")
        noted = 0
    assert same(read(folder_of(images, location, test_fraction=0)), expected)
    assert len(decoded) - number == 60 - noted


def test_a_full_disk_is_one_sentence(images, location, monkeypatch):
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"has no room for the decoded images \(No space left on device\): they need"):
        read(folder_of(images, location))
    assert not (only(location) / "partial").exists()
    monkeypatch.undo()
    monkeypatch.setattr(cache, "MIN_SECONDS_TO_CACHE", 0)
    read(folder_of(images, location))


def test_a_complete_cache_needs_no_lock_and_no_write_permission(images, location):
    whole = read(folder_of(images, location))
    with (only(location) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert same(read(folder_of(images, location)), whole)
    only(location).chmod(0o500)
    location.chmod(0o500)
    try:
        assert same(read(folder_of(images, location)), whole)
    finally:
        location.chmod(0o700)
        only(location).chmod(0o700)


def test_free_disk_space_is_checked_before_decoding(images, location, decoded, monkeypatch):
    """One byte less than the 48 images of the split, 60 less a fifth, of 3 x 8 x 8 pixels need."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=48 * 3 * 8 * 8 - 1))
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: pytest.fail("the disk is too small"))
    with pytest.raises(InputError, match=r"no room .*they need .*are free; .* or lower dataset.limit"):
        read(folder_of(images, location, storage="decoded"))
    assert not decoded
    monkeypatch.undo()


def test_a_cache_above_64_gib_is_stored_and_mapped(tmp_path, monkeypatch):
    """460,000 images of 3 x 224 x 224 bytes are 69,242,880,000 bytes; 64 GiB are 68,719,476,736. The file is sparse."""
    monkeypatch.setattr(stores, "_reserve", lambda file, size: file.touch() or os.truncate(file, size))
    index = SequenceIndex(
        name="large",
        count=460_000,
        decoding=Decoding(channels=3, size=224, dtype="uint8"),
        files=[],
        images=[],
        num_in_files=1,
        key={},
    )
    pixels = stores.Pixels(index, tmp_path)
    monkeypatch.setattr(pixels, "_decode", lambda: (pixels._start(), pixels.write(index.count - 1, 7)))
    made = pixels.make(required=True)
    assert tuple(made.shape) == (460_000, 3, 224, 224)
    assert (tmp_path / "pixels").stat().st_size == 69_242_880_000
    stored = stores.Pixels(index, tmp_path).read()
    assert stored[-1:].unique().tolist() == [7]
    assert stored[:1].unique().tolist() == [0]
