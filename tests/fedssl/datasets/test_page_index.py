"""Pages of files as images of a folder: their order, classes, splits, caches and storages."""

import errno
import shutil
import struct
import zlib
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.datasets import base, folder, storage
from fedssl.datasets import pages as opened_files
from fedssl.errors import InputError
from fedssl.evaluation.protocol import make_evaluation_input
from fedssl.evaluation.segmentation import read_masks
from fedssl.evaluation.targets import as_numbers, read_targets
from simulation.run import run
from tests.fedssl.datasets.made import settings_of

UNTESTED = {"local_epochs": 1, "evaluate_every": 0, "final_evaluation": "none", "measure_resources": "false"}
STACK = np.random.default_rng(0).integers(0, 65536, (6, 8, 8), dtype=np.uint16)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes with a stack of six pages each, and a file with one."""
    for name, values in (("cat", STACK), ("dog", STACK[::-1])):
        (tmp_path / "data" / name).mkdir(parents=True)
        tifffile.imwrite(tmp_path / "data" / name / "a.tif", values)
    tifffile.imwrite(tmp_path / "data" / "dog" / "b.tif", STACK[0])
    return tmp_path / "data"


def read(path: Path, pages: str, *, split: str = "train", channels: int = 1, **settings: object):
    return folder.read(split, channels=channels, size=8, limit=None, path=str(path), pages=pages, **settings)


@pytest.mark.parametrize("storage", ["decoded", "encoded"])
def test_all_pages_are_images(images, storage, tmp_path, monkeypatch):
    monkeypatch.setattr("fedssl.datasets.cache.MIN_SECONDS_TO_CACHE", 0)
    for _ in range(2):  # the second time from the cache
        made = read(images, "all", storage=storage, cache=str(tmp_path / "cache"))
        assert made.labels.tolist() == [0] * 6 + [1] * 7
        assert np.array_equal(made.images[:].numpy()[:, 0], np.concatenate([STACK, STACK[::-1], STACK[:1]]))
        assert made.warnings == ()
    first = read(images, "first", storage=storage, cache=str(tmp_path / "cache"))
    assert np.array_equal(first.images[:].numpy()[:, 0], STACK[[0, 5, 0]])
    assert "2 of a sample of 3 images have several pages or frames, and only the first is used" in first.warnings[0]


@pytest.mark.parametrize("ending", ["gif", "webp", "avif", "png"])
def test_frames_of_animations_are_images(tmp_path, ending):
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (0, 100, 200)]
    for name in ("a", "b"):
        frames[0].save(tmp_path / f"{name}.{ending}", save_all=True, append_images=frames[1:])
    frames[1].save(tmp_path / f"c.{ending}")
    made = read(tmp_path, "all", channels=3, folders="none")
    found = made.images[:].flatten(1).float().mean(dim=1)
    assert torch.allclose(found, torch.tensor([0.0, 100, 200, 0, 100, 200, 100]), atol=2)
    (warning,) = read(tmp_path, "auto", channels=3, folders="none").warnings
    assert warning.startswith("2 of a sample of 3 images have several pages or frames, and only the first is used")


def test_frames_that_a_file_cannot_have_are_not_counted(tmp_path):
    file, frames = tmp_path / "a.png", [Image.fromarray(np.full((8, 8), value, np.uint8)) for value in range(3)]
    frames[0].save(file, save_all=True, append_images=frames[1:])
    content = file.read_bytes()
    start = content.index(b"acTL") + 4
    stated = b"acTL" + struct.pack(">2I", 50_000, 0)
    file.write_bytes(content[: start - 4] + stated + struct.pack(">I", zlib.crc32(stated)) + content[start + 12 :])
    with opened_files.open_pages(file, max_pixels=64, channels=1) as pages:
        assert pages.count == len(content) // 38
    found = read(tmp_path, "all", folders="none").images[:]
    assert found.flatten(1).float().mean(dim=1).tolist() == [0, 1, 2]


def test_files_of_one_frame_can_be_bands(tmp_path):
    for scene, band in product(("x", "y"), range(3)):
        (tmp_path / scene).mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), 50 * band, np.uint8)).save(tmp_path / scene / f"band{band}.webp", lossless=True)
    made = read(tmp_path, "channels", channels=3, folders="none")
    assert made.images[:][:, :, 0, 0].tolist() == [[0, 50, 100]] * 2


def test_files_that_a_table_names_have_pages(images, tmp_path):
    table = tmp_path / "list.csv"
    table.write_text("path,label,patient\ndata/cat/a.tif,cat,p1\ndata/dog/a.tif,dog,p2\ndata/dog/b.tif,dog,p3\n")
    made = read(table, "all", group="patient")
    assert made.labels.tolist() == [0] * 6 + [1] * 7
    assert made.groups.tolist() == [0] * 6 + [1] * 6 + [2]
    assert np.array_equal(made.images[:].numpy()[:, 0], np.concatenate([STACK, STACK[::-1], STACK[:1]]))
    index, rows = made.origin
    assert [index.values("patient")[row] for row in rows] == ["p1"] * 6 + ["p2"] * 6 + ["p3"]
    assert len(read(table, "channels", channels=3, group="patient").images) == 4
    assert len(read(table, "first").images) == 3


def test_one_stack_per_class_is_not_held_out(images, caplog):
    (images / "dog" / "b.tif").unlink()
    assert read(images, "all", split="test", test_fraction=0.2) is None
    assert "the pages of a file are a group: divide the files, raise dataset.test_fraction" in caplog.text
    assert "dataset.group" not in caplog.text


def test_successive_pages_are_channels(images):
    made = read(images, "channels", channels=3)
    assert made.labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(made.images[0:1].numpy()[0], STACK[:3])
    assert np.array_equal(made.images[2:3].numpy()[0], STACK[::-1][:3])
    assert "b.tif[0] (it has 1 pages, which are no multiple of dataset.channels=3)" in made.warnings[0]


def test_stacks_of_arrays_are_volumes(tmp_path):
    np.save(tmp_path / "volume.npy", np.repeat(np.repeat(STACK, 16, 1), 16, 2).repeat(20, 0))  # 120 x 128 x 128
    made = read(tmp_path, "auto", folders="none")
    assert len(made.images) == 120
    assert len(read(tmp_path, "first", folders="none").images) == 1


def test_a_damaged_file_is_reported_once(images):
    (images / "cat" / "c.tif").write_bytes(b"II*\0damaged")
    made = read(images, "all")
    assert len(made.images) == 13
    assert made.warnings[0].startswith("1 of 14 images cannot be read, the rest is used: ")


def test_pages_that_cannot_be_counted_are_a_warning(images, monkeypatch):
    def fail(pages):
        raise ValueError("absurd times")

    monkeypatch.setattr("fedssl.datasets.pages._PillowPages.count", property(fail))
    (warning,) = read(images / "cat", "all", folders="none").warnings[:1]
    assert warning.startswith("the pages of 1 files cannot be counted, and only the first is used: ")
    assert warning.endswith("a.tif (absurd times)")


def test_a_run_uses_all_pages(images, tmp_path):
    data = {"path": images, "pages": "all", "channels": 1, "size": 8, "mean": "[0.5]", "std": "[0.3]"}
    own = {"num_clients": 2, "rounds": 1, "batch_size": 4, "encoder.width": 4, "threads": 1, "engine": "local"}
    own |= UNTESTED | {"dataset": "folder", "output_dir": tmp_path / "run"}
    own |= {f"dataset.{key}": value for key, value in data.items()}
    run([f"{key}={value}" for key, value in own.items()])
    rows = (tmp_path / "run" / "partition.csv").read_text().splitlines()[1:]
    assert (
        sum(int(row.split(",")[1]) for row in rows) == 12
    )  # of 13: pages of a file are a group, and the file of one page is held out


def test_a_resumed_run_has_the_same_image_files(images, tmp_path):
    own = {"dataset": "folder", "dataset.path": images, "dataset.pages": "all", "dataset.size": 8, "engine": "local"}
    own |= {"dataset.channels": 1, "dataset.mean": "[0.5]", "dataset.std": "[0.3]", "encoder.width": 4, "threads": 1}
    own |= {"num_clients": 2, "rounds": 2, "pause_after": 1, "batch_size": 4, "output_dir": tmp_path / "run"} | UNTESTED
    run([f"{key}={value}" for key, value in own.items()])
    copy = shutil.copytree(images, tmp_path / "copy")
    tifffile.imwrite(images / "dog" / "a.tif", STACK[:, :, :7])
    base.forget_images()  # as in a new process
    with pytest.raises(InputError, match=r"images are in 2 files, .* and were in 2 files, .* restore the files, or"):
        run([f"resume={tmp_path / 'run'}"])
    shutil.copytree(copy, images, dirs_exist_ok=True)
    run([f"resume={tmp_path / 'run'}"])


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Two scenes of two classes each, with three bands of different resolutions."""
    for number in range(4):
        folder = tmp_path / "scenes" / ("field", "city")[number % 2] / f"S{number}"
        folder.mkdir(parents=True)
        for place, band in enumerate(("B02", "B03", "B8A")):
            values = np.full((16 >> place, 16 >> place), 1000 * number + place, np.uint16)
            tifffile.imwrite(folder / f"S{number}_{band}.tif", values)
    return tmp_path / "scenes"


@pytest.mark.parametrize("storage", ["decoded", "encoded"])
def test_files_of_a_folder_are_channels(scenes, storage, tmp_path, monkeypatch):
    monkeypatch.setattr("fedssl.datasets.cache.MIN_SECONDS_TO_CACHE", 0)
    for _ in range(2):  # the second time from the cache
        made = read(scenes, "channels", channels=3, storage=storage, cache=str(tmp_path / "cache"))
        assert made.classes == ("city", "field")
        assert made.labels.tolist() == [0, 0, 1, 1]
        expected = [[1000 * number + band for band in range(3)] for number in (1, 3, 0, 2)]
        assert made.images[:].numpy()[:, :, 0, 0].tolist() == expected


def test_folders_of_bands_are_no_groups_in_classes(scenes, caplog, log_again):
    assert read(scenes, "channels", split="test", channels=3, test_fraction=0.5).labels.tolist() == [0, 1]
    assert "dataset.group=folder" not in caplog.text


def test_folders_without_the_same_bands_are_refused(scenes):
    message = r"field/S0 has .* in place of dataset.channels=4 bands; .* or set dataset.pages="
    with pytest.raises(InputError, match=message):
        read(scenes / "field", "channels", channels=4, folders="none")
    with pytest.raises(InputError, match=r"each image would be a class of its own, .*; set dataset.folders=none"):
        read(scenes / "field", "channels", channels=3)
    (scenes / "field" / "S2" / "S2_B02.tif").rename(scenes / "field" / "S2" / "S2_B04.tif")
    with pytest.raises(InputError, match=r"S2 has S2_B03.tif, .* in place of bands such as 02.tif, 03.tif, 8A.tif"):
        read(scenes / "field", "channels", channels=3, folders="none")


def test_a_damaged_band_makes_its_image_unreadable(scenes):
    (scenes / "field" / "S2" / "S2_B03.tif").write_bytes(b"II*\0damaged")
    made = read(scenes, "channels", channels=3)
    assert made.labels.tolist() == [0, 0, 1]
    assert f"{scenes}/field/S2 (" in made.warnings[0]


def test_bands_that_could_not_be_read_are_read_again(scenes, tmp_path, monkeypatch):
    """A share that was offline for a while."""
    monkeypatch.setattr("fedssl.datasets.cache.MIN_SECONDS_TO_CACHE", 0)
    read_file = opened_files.open_regular_file

    def fail(file, **limits):
        if Path(file).name == "S2_B03.tif":
            raise OSError(errno.EIO, "Input/output error", str(file))
        return read_file(file, **limits)

    for offline, count in ((True, 3), (True, 3), (False, 4)):
        for module in (opened_files, storage):
            monkeypatch.setattr(module, "open_regular_file", fail if offline else read_file)
        base.forget_images()
        assert len(read(scenes, "channels", channels=3, cache=str(tmp_path / "cache")).images) == count


def test_folders_of_bands_have_targets_and_masks(scenes, tmp_path):
    names = ["train/field/S0", "train/city/S1", "test/field/S2", "test/city/S3"]
    for name in names:
        (scenes / name).parent.mkdir(parents=True, exist_ok=True)
        (scenes / name.partition("/")[2]).rename(scenes / name)
    for number, name in enumerate(names):
        mask = tmp_path / "masks" / f"{name}.png"
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), number).save(mask)
    (scenes / "t.csv").write_text("scene,x\n" + "".join(f"{name},{i}\n" for i, name in enumerate(names)))
    data = settings_of("folder", path=str(scenes), pages="channels", channels=3, size=8, folders="none")
    data = replace(data, mean=(0.5,) * 3, std=(0.3,) * 3)
    subject = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
    targets = read_targets(subject, columns=None, file=str(scenes / "t.csv"), convert=as_numbers)
    for images, expected in ((subject.train, targets.train), (subject.test, targets.test)):
        masks = read_masks(images, str(tmp_path / "masks"))
        numbers = images.images[:][:, 0, 0, 0].numpy() // 1000
        assert masks[:, 0, 0].tolist() == numbers.tolist() == expected[:, 0].tolist()
