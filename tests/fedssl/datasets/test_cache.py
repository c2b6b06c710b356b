"""Cache of decoded images: the same bits, decoded once, also by several processes and on small disks."""

import fcntl
import hashlib
import json
import logging
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from fedssl.datasets import base, cache, stores
from fedssl.datasets.base import ImageData
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.image_index import SequenceIndex
from fedssl.datasets.images import EncodedImages, MappedImages
from fedssl.errors import InputError
from tests.fedssl.datasets.made import settings_of
from tests.fedssl.datasets.stored import load, only, same, write

pytestmark = pytest.mark.usefixtures("cache_all_data_sets")


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write(tmp_path / "data", "folder")
    return tmp_path / "data"


def test_the_cache_key_covers_all_that_pixels_depend_on(images, location, reads, monkeypatch):
    def number(**changes: object) -> int:
        before = len(reads)
        load(images, "folder", location, storage="decoded", **changes)
        return len(reads) - before

    assert number()
    assert only(location).name.startswith("data-train-20px-")
    for changes in ({"channels": 1, "mean": [0.5], "std": [0.5]}, {"limit": 20}, {"test_fraction": 0}):
        assert number(**changes)
        assert not number(**changes)
    assert not number()
    os.utime(images / "class0" / "02.jpg", ns=(0, 0))  # written anew, with an image of the same size
    assert number()
    assert not number()
    (images / "class2").mkdir()
    Image.new("RGB", (8, 8)).save(images / "class2" / "61.png")
    assert number()
    monkeypatch.setattr(cache, "VERSION", 0)
    assert number()
    monkeypatch.setattr(cache, "installed_packages", lambda: ["TIFF"])
    assert not number()  # JPEG and PNG need no package
    Image.new("RGB", (8, 8)).save(images / "class2" / "62.tif")
    assert number()
    monkeypatch.setattr(cache, "installed_packages", list)
    assert number()


def test_unchanged_images_stay_in_memory(images, reads):
    """Of changed files only the new images do."""
    settings = settings_of("folder", path=str(images), size=20, test_fraction=0.2, cache=None)

    def read() -> ImageData:
        base.find_changes()
        reads.clear()
        return base.load_split(settings, "federated")

    before = read()
    assert reads
    assert read().images is before.images
    assert not reads
    os.utime(images / "class0" / "02.jpg", ns=(0, 0))
    changed = read()
    assert reads
    assert [source is changed.images for _, source, _ in base.decoded.values()] == [True]


CHILD = """
import sys, time
from pathlib import Path
from fedssl.datasets import cache, image_index, storage
from fedssl.datasets.decoding import Decoding
from tests.fedssl.datasets.stored import load
cache.MIN_SECONDS_TO_CACHE, image_index.BATCH = 0, 2
storage.DECODE_LOG_INTERVAL, storage.THREADS = 0.01, 2
original = Decoding.each
def slow(source):
    time.sleep({pause})
    with open("{log}", "a") as log:
        log.write(f"{{source}}\\n")
    return source
Decoding.each = lambda decoding, sources: original(decoding, map(slow, sources))
import hashlib
for location in sys.argv[1:]:
    images = load(Path("{images}"), "folder", location, test_fraction=0)
    print(hashlib.sha256(images.images[:].numpy().tobytes()).hexdigest(), images.labels.sum().item(), flush=True)
"""


def start(images: Path, *locations: Path, log: Path, pause: float) -> subprocess.Popen[str]:
    """Start a process that decodes the images into each location."""
    code = CHILD.format(images=images, log=log, pause=pause)
    return subprocess.Popen([sys.executable, "-c", code, *locations], stdout=subprocess.PIPE, text=True)


def wait_for(condition) -> None:
    end = time.monotonic() + 60
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
def test_a_waiting_process_resumes_the_decoding_of_a_dead_one(images, tmp_path, reads, caplog):
    log, locations = tmp_path / "log", (tmp_path / "first", tmp_path / "second")
    expected = digest(load(images, "folder", None, test_fraction=0))
    reads.clear()
    caplog.set_level(logging.INFO)
    other = start(images, *locations, log=log, pause=0.05)

    wait_for(lambda: done(locations[0]) >= 10)
    assert digest(load(images, "folder", locations[0], test_fraction=0)) == expected
    assert "another process decodes the images of" in caplog.text
    assert other.stdout.readline().strip() == expected
    assert reads == []

    caplog.clear()

    def kill() -> tuple[int, int]:
        """Return the numbers of images that were decoded there and here."""
        wait_for(lambda: done(locations[1]) >= 30)
        other.send_signal(signal.SIGSTOP)
        wait_for(lambda: "another process decodes the images of" in caplog.text)
        numbers = done(locations[1]), len(reads)
        other.kill()
        other.wait()
        return numbers

    with ThreadPoolExecutor(1) as pool:
        numbers = pool.submit(kill)
        assert digest(load(images, "folder", locations[1], test_fraction=0)) == expected
    there, here = numbers.result()
    assert here == 0
    assert len(reads) == 60 - there
    assert len(log.read_text().splitlines()) >= 60 + there


def test_a_full_disk_is_one_sentence(images, location, monkeypatch):
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InputError, match=r"no room for the decoded images \(No space left on device\): they need"):
            load(images, "folder", location, storage="decoded")
    assert not (only(location) / "partial").exists()
    load(images, "folder", location, storage="decoded")


def test_a_complete_cache_needs_no_lock_and_no_write_permission(images, location):
    whole = load(images, "folder", location, storage="decoded")
    with (only(location) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert same(load(images, "folder", location, storage="decoded"), whole)
    only(location).chmod(0o500)
    location.chmod(0o500)
    try:
        assert same(load(images, "folder", location, storage="decoded"), whole)
    finally:
        location.chmod(0o700)
        only(location).chmod(0o700)


def test_without_a_home_folder_images_stay_in_memory(images, location, monkeypatch, caplog, log_again):
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user without an entry
    found = load(images, "folder", "auto", storage="decoded")
    assert "this user has no home folder" in caplog.text
    assert same(found, load(images, "folder", location, storage="decoded"))


NEEDED = 48 * 3 * 20 * 20  # bytes of the images of the split, 60 less a fifth


def test_free_disk_space_is_checked_before_decoding(images, location, reads, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=NEEDED - 1))
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: pytest.fail("the disk is too small"))
    with pytest.raises(InputError, match=r"no room .*they need .*are free; .* or lower dataset.limit"):
        load(images, "folder", location, storage="decoded")
    assert not reads


ROOMS = [(2 * NEEDED, 2 * NEEDED, ""), (2 * NEEDED - 1, 10**9, "memory"), (10**9, 2 * NEEDED - 1, "disk")]


@pytest.mark.parametrize(("memory", "disk", "encoded"), [*ROOMS, (None, 10**9, "")])
def test_auto_decodes_into_at_most_half_of_the_room(images, location, monkeypatch, caplog, memory, disk, encoded):
    monkeypatch.setattr(cache, "available_memory", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk))
    caplog.set_level(logging.INFO)
    images = load(images, "folder", location, storage="auto").images
    assert isinstance(images, EncodedImages if encoded else MappedImages)
    chosen = [line for line in caplog.messages if line.startswith("dataset.storage=auto: ")]
    assert [encoded in line and "0.1 MB, more than half of the" in line for line in chosen] == [True] * bool(encoded)


def test_a_cache_above_64_gib_is_stored_and_mapped(tmp_path, monkeypatch):
    """460,000 images of 3 x 224 x 224 bytes are 69,242,880,000 bytes; 64 GiB are 68,719,476,736. The file is sparse."""
    monkeypatch.setattr(stores, "_reserve", lambda file, size: file.touch() or os.truncate(file, size))
    form, nothing = Decoding(channels=3, size=224, dtype="uint8"), {"files": [], "images": [], "key": {}}
    index = SequenceIndex(name="large", count=460_000, decoding=form, num_in_files=1, **nothing)
    pixels = stores.Pixels(index, tmp_path)
    monkeypatch.setattr(pixels, "_decode", lambda: (pixels._start(), pixels.write(index.count - 1, 7)))
    made = pixels.make(required=True)
    assert tuple(made.shape) == (460_000, 3, 224, 224)
    assert (tmp_path / "pixels").stat().st_size == 69_242_880_000
    stored = stores.Pixels(index, tmp_path).read()
    assert stored[-1:].unique().tolist() == [7]
    assert stored[:1].unique().tolist() == [0]
