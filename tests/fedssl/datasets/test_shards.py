"""Tar shards of WebDataset."""

import gzip
import io
import json
import resource
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io

from fedssl.datasets import base
from fedssl.datasets.base import ImageData, load_split
from fedssl.datasets.images import EncodedImages
from fedssl.errors import InputError
from tests.fedssl.datasets.made import first_pixels, make_image, png, settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def shard(file: Path, members: Mapping[str, bytes], mode: str = "w") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def samples(*values: int, folder: str = "") -> dict[str, bytes]:
    """Return samples whose first pixel and class are known."""
    members = {}
    for value in values:
        members |= {f"{folder}{value:04d}.png": png(make_image(value)), f"{folder}{value:04d}.cls": b"%d" % (value % 3)}
    return members


def read(path: Path | str, split: str = "train", **changes: object) -> ImageData | None:
    base.forget_images()
    settings = {"path": str(path), "size": 4, "cache": None, "test_fraction": 0.0}
    return load_split(settings_of("folder", **settings | changes), split)


def test_a_file_of_a_sample_replaces_its_json_value(tmp_path: Path) -> None:
    """Labels are the same in all processes, whose hashes of texts differ."""
    members = {f"{name}.json": json.dumps({"cls": 7, "id": 1}).encode() for name in "ab"}
    shard(tmp_path / "a.tar", members | {"a.png": b"", "b.png": b"", "a.cls": b"1"})
    code = (
        "import sys; from fedssl.datasets.shards import *; print(shard_table(Path(sys.argv[1]))['label'].to_pylist())"
    )
    for seed in ("0", "2"):
        command = [sys.executable, "-c", code, tmp_path / "a.tar"]
        done = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert done.stdout == "[1, 7]\n", done.stderr


def test_shards_of_splits(tmp_path: Path) -> None:
    shard(tmp_path / "train-000.tar", samples(1, 2))
    shard(tmp_path / "train-001.tar", samples(5, 3))
    shard(tmp_path / "val-000.tar", samples(7))
    for storage in ("decoded", "encoded"):
        train = read(tmp_path, storage=storage)
        assert (first_pixels(train.images), train.labels.tolist()) == ([1, 2, 5, 3], [1, 2, 2, 0])
        assert isinstance(train.images, EncodedImages) == (storage == "encoded")
    assert first_pixels(read(tmp_path, "test").images) == [7]
    assert first_pixels(read(f"{tmp_path}/train-{{000..001}}.tar").images) == [1, 2, 5, 3]
    assert first_pixels(read(f"{tmp_path}/train-001.tar").images) == [5, 3]
    message = r"names 4 files or patterns, of which 2 match no file, such as .*/train-002\.tar"
    with pytest.raises(InputError, match=message):
        read(f"{tmp_path}/train-{{000..003}}.tar")
    limited = read(tmp_path, limit=3, storage="encoded")
    assert first_pixels(limited.images) == first_pixels(read(tmp_path, limit=3).images)


@pytest.mark.parametrize("ending", ["tar", "parquet"])
def test_empty_files_beside_others_have_no_row(tmp_path: Path, ending: str) -> None:
    shard(tmp_path / "train-000.tar", samples(1, 2))
    if ending == "tar":
        shard(tmp_path / "train-001.tar", {})
    else:
        pq.write_table(pa.table({}), tmp_path / "train-001.parquet")
    assert first_pixels(read(tmp_path).images) == [1, 2]


def test_labels_and_groups_of_a_json(tmp_path: Path) -> None:
    members = {}
    for number, (name, patient) in enumerate([("cat", "p1"), ("dog", "p2"), ("cat", "p1")]):
        members[f"{name}/{number}.jpg.png"] = png(make_image(number))
        members[f"{name}/{number}.json"] = json.dumps({"species": name, "patient": patient, "boxes": [1, 2]}).encode()
    shard(tmp_path / "train.tar", members)
    data = read(tmp_path, label="species", group="patient")
    assert ([data.classes[label] for label in data.labels], data.groups.tolist()) == (["cat", "dog", "cat"], [0, 1, 0])
    data = read(tmp_path, label="folder", group="folder")
    assert ([data.classes[label] for label in data.labels], data.groups.tolist()) == (["cat", "dog", "cat"], [0, 1, 0])


def test_names_of_digits_stay_apart_in_all_shards(tmp_path: Path) -> None:
    patients = [["007", "8", 9], ["P1", "007", "7"]]
    for number, part in enumerate(patients):
        members = {}
        for row, patient in enumerate(part):
            name = f"{number:02}/{number}{row}."
            members |= {f"{name}png": png(make_image(row)), f"{name}json": json.dumps({"patient": patient}).encode()}
            members[f"{name}cls"] = b"01" if (number, row) == (0, 1) else b"1"
        shard(tmp_path / f"train-{number}.tar", members)
    data = read(tmp_path, owner="patient")
    assert [data.owner_names[owner] for owner in data.owners] == ["007", "8", "9", "P1", "007", "7"]
    assert [data.classes[label] for label in data.labels] == ["1", "01", "1", "1", "1", "1"]
    data = read(tmp_path, label="folder", group="folder", held_out="P1", owner="patient")
    assert (data.classes, data.labels.tolist()) == (("00", "01"), [0, 0, 0, 1, 1])


@pytest.mark.parametrize("storage", ["decoded", "encoded"])
def test_more_shards_are_read_than_may_be_open(tmp_path: Path, storage: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 2 * len([*Path("/dev/fd").iterdir()]) + 30
    for number in range(allowed + 1):
        shard(tmp_path / f"train-{number:04}.tar", samples(number % 200))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, limits[1]))
    try:
        data = read(tmp_path, storage=storage, test_fraction=0.5)
        pixels = first_pixels(data.images)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    test = read(tmp_path, "test", test_fraction=0.5)
    assert sorted(pixels + first_pixels(test.images)) == sorted(number % 200 for number in range(allowed + 1))


def test_many_shards_are_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, number = list[object](), 1100  # more than the 1,024 of ImageNet's
    for place in range(number):
        shard(tmp_path / f"{place:04}.tar", samples(place % 200, folder=f"{place}-"))
    open_archive = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda **words: opened.append(words) or open_archive(**words))
    data = read(tmp_path)
    assert data is not None
    assert (len(data.images), len(opened)) == (number, number)


def test_several_images_of_a_sample_need_a_choice(tmp_path: Path) -> None:
    members = {"1.png": png(make_image(1)), "1.seg.png": png(make_image(90)), "2.png": png(make_image(2))}
    shard(tmp_path / "train.tar", members)
    with pytest.raises(InputError, match=r"several columns of images \(png, seg\.png\) .*; set dataset\.image=COLUMN"):
        read(tmp_path)
    assert first_pixels(read(tmp_path, image="png").images) == [1, 2]
    data = read(tmp_path, image="seg.png")
    assert first_pixels(data.images) == [90]  # the other sample has none
    assert any("1 of 2 images cannot be read" in warning for warning in data.warnings)
    with pytest.raises(InputError, match=r"has no column 'jpg'"):
        read(tmp_path, image="jpg")


def test_keys_with_dots_and_images_of_other_formats(tmp_path: Path) -> None:
    members = {f"./img.v1.{number}.png": png(make_image(number)) for number in range(1, 101)}
    members["img.v1.101.BMP"] = png(make_image(101))
    shard(tmp_path / "train.tar", members)
    assert first_pixels(read(tmp_path).images) == list(range(1, 102))


def test_samples_whose_keys_have_dots_keep_their_labels(tmp_path: Path) -> None:
    made = {f"p{number:02}_1.5mm": number for number in range(1, 13)}
    images = {f"{name}.png": png(make_image(number)) for name, number in made.items()}
    texts = {f"{name}.cls": b"%d" % (number % 2) for name, number in made.items()}
    shard(tmp_path / "train.tar", images | texts)
    data = read(tmp_path)
    assert first_pixels(data.images) == list(range(1, 13))
    assert data.labels.tolist() == [1, 0] * 6


def test_slices_with_numbers_are_samples(tmp_path: Path) -> None:
    numbers = range(1, 14)
    shard(tmp_path / "scan" / "train.tar", {f"a.{number:04d}.png": png(make_image(number)) for number in numbers})
    assert first_pixels(read(tmp_path / "scan").images) == [*numbers]


@pytest.mark.parametrize(
    ("keys", "views", "texts"),
    [(("1", "2"), ("10", "11", "12"), ()), (("1",), ("0", "1"), ()), (("1",), ("10", "11"), ("1",))],
)
def test_numbered_views_of_a_sample_are_columns(tmp_path: Path, keys, views, texts) -> None:
    members = {f"{key}.{view}.png": png(make_image(int(view))) for key in keys for view in views}
    shard(tmp_path / "train.tar", members | {f"{key}.cls": b"1" for key in texts})
    data = read(tmp_path, image=f"{views[-1]}.png")
    assert first_pixels(data.images) == [int(views[-1])] * len(keys)
    assert data.labels is None or data.labels.tolist() == [1]


def test_several_images_of_a_sample_are_columns(tmp_path: Path) -> None:
    names = [f"{number:03d}.{part}" for number in range(3) for part in ("left.png", "right.png", "left.txt")]
    shard(tmp_path / "train.tar", {name: png(make_image(7)) for name in names})
    with pytest.raises(InputError, match=r"several columns of images \(left\.png, right\.png\)"):
        read(tmp_path)


def test_malicious_members_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(make_image(9)))
    file = tmp_path / "data" / "train.tar"
    shard(file, {"../../escape.png": png(make_image(1)), "/etc/absolute.png": png(make_image(2)), "1.pyd": b"cos\n"})
    with tarfile.open(file, "a") as archive:
        kinds = {"link.png": tarfile.SYMTYPE, "hard.png": tarfile.LNKTYPE, "pipe.png": tarfile.FIFOTYPE}
        for name, kind in kinds.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(tmp_path / "secret.png")
            archive.addfile(info)
    before = sorted(tmp_path.rglob("*"))
    data = read(file)
    assert first_pixels(data.images) == [1, 2]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no tar", r"train\.tar cannot be read \(it is no uncompressed tar file"),
        ("w:gz", r"train\.tar cannot be read \(it is no uncompressed tar file"),
        ("w", r"train\.tar cannot be read \(it is no uncompressed tar file: unexpected end"),
        (b"", r"train\.tar cannot be read|no column|names no images"),
    ],
    ids=["text", "compressed", "cut", "empty"],
)
def test_unusable_shards_are_one_sentence(tmp_path: Path, content: bytes | str, message: str) -> None:
    if isinstance(content, str):
        shard(tmp_path / "train.tar", samples(1, 2, 3), content)
        content = (tmp_path / "train.tar").read_bytes()[: 2000 if content == "w" else None]
    (tmp_path / "train.tar").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("change", ["damaged", "joined", "cut"])
def test_no_image_of_a_damaged_shard_is_lost_silently(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The library ends without an error at a damaged header, and at the end of the first of joined files."""
    shard(tmp_path / "train.tar", samples(1, 2, 3))
    content = (tmp_path / "train.tar").read_bytes()
    place = content.index(b"0002.png")  # that of its header
    changed = {"damaged": content[:place] + b"?" * 512 + content[place + 512 :], "joined": 2 * content}
    (tmp_path / "train.tar").write_bytes(changed.get(change, content[:place]))
    if change == "cut":  # between two members
        assert first_pixels(read(tmp_path).images) == [1]
        assert "has no end: it may be cut" in caplog.text
    else:
        with pytest.raises(InputError, match="cut or damaged at byte .*, or several files are joined"):
            read(tmp_path)


def test_folders_of_splits_are_a_column(tmp_path: Path) -> None:
    members = samples(1, folder="data/Train/cat/") | samples(4, folder="data/Train/dog/")
    shard(tmp_path / "a.tar", members | samples(7, folder="data/val/dog/") | {"./data/val/dog/._7.png": b"of macOS"})
    train, test = read(tmp_path, label="folder"), read(tmp_path, "test", label="folder")
    assert (first_pixels(train.images), train.labels.tolist(), train.classes) == ([1, 4], [0, 1], ("cat", "dog"))
    assert (first_pixels(test.images), test.labels.tolist(), test.warnings) == ([7], [1], ())


@pytest.mark.parametrize("ending", ["tar.gz", "TGZ"])
def test_compressed_shards_are_read_like_others(tmp_path: Path, ending: str) -> None:
    members = samples(1, 2) | {"0003.json": json.dumps({"label": 0}).encode(), "0004.png": b"damaged"}
    shard(tmp_path / f"train-000.{ending}", members, "w:gz")
    shard(tmp_path / f"train-001.{ending}", samples(5, 3), "w:gz")
    shard(tmp_path / "val.tar", samples(7))
    for storage, cache in (("decoded", None), ("encoded", None), ("encoded", str(tmp_path / "cache"))):
        train = read(tmp_path, storage=storage, cache=cache)
        assert (first_pixels(train.images), train.labels.tolist()) == ([1, 2, 5, 3], [1, 2, 2, 0])
        assert any("2 of 6 images cannot be read" in warning for warning in train.warnings)
    few = [first_pixels(read(tmp_path, limit=3, storage=storage).images) for storage in ("decoded", "encoded")]
    assert few[0] == few[1]
    assert first_pixels(read(tmp_path, "test").images) == [7]
    assert first_pixels(read(tmp_path, splits={"federated": "val", "train": "val", "test": None}).images) == [7]
    shard(tmp_path / "train-002.tar", samples(9))  # beside compressed ones
    assert first_pixels(read(tmp_path).images) == [1, 2, 5, 3, 9]


def test_images_of_compressed_shards_in_another_order(tmp_path: Path) -> None:
    """The key of the first sample comes before its image."""
    members = {"a.cls": b"0", "b.png": png(make_image(2)), "b.cls": b"1", "a.png": png(make_image(1))}
    shard(tmp_path / "train.tgz", members, "w:gz")
    data = read(tmp_path, storage="encoded")
    assert (first_pixels(data.images), data.labels.tolist()) == ([1, 2], [0, 1])


def packed(*parts: bytes | int) -> bytes:
    """Compress parts, of which a number is one of zeros."""
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="w") as file:
        for part in parts:
            file.write(bytes(part) if isinstance(part, int) else part)
    return stream.getvalue()


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(header("1.png", 2**40)), r"its files have 1,099,511,628,288 bytes, more than 67,108,864"),
        (packed(header("x", 2**30, tarfile.XHDTYPE), 4096), r"it has a part of \d+ bytes"),
        (packed(header("x", 2**30, tarfile.GNUTYPE_LONGNAME), 4096), r"it has a part of \d+ bytes"),
        (packed(header("1.png", 4), 512, *[2**24] * 5), r"it is cut or damaged at byte"),
        (packed(header("1.png", 4), 512)[:-9], r"it is no tar file of gzip"),
        (b"no archive", r"Not a gzipped file"),
        (packed(b"no archive"), r"it is no tar file of gzip"),
    ],
    ids=["member", "header", "name", "zeros", "cut", "text", "packed text"],
)
def test_unusable_compressed_shards_are_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.tar.gz").write_bytes(content)
    with pytest.raises(InputError, match=rf"train\.tar\.gz cannot be read \({message}|{message}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "mode", "command"), [("a.tar.bz2", "w:bz2", "tar xf FILE -C FOLDER"), ("a.png.gz", "w", "gunzip FILE")]
)
def test_the_remedy_for_other_archives_works(tmp_path: Path, name: str, mode: str, command: str) -> None:
    if mode == "w":
        (tmp_path / name).write_bytes(packed(png(make_image(4))))
    else:
        shard(tmp_path / name, samples(4), mode)
    message = rf"holds no image .*; unpack archives into an existing folder first: {command}"
    with pytest.raises(InputError, match=message):
        read(tmp_path)
    typed = command.replace("FILE", str(tmp_path / name)).replace("FOLDER", str(tmp_path))
    subprocess.run(typed.split(), check=True)
    assert first_pixels(read(tmp_path).images) == [4]


def test_the_remedy_for_arrays_of_matlab_works(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = np.arange(4 * 4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 4, 3)
    scipy.io.savemat("digits.mat", {"x": images})
    with pytest.raises(
        InputError, match=r"store arrays as .npy, images along the first axis: numpy.save\('images.npy', .*loadmat"
    ) as error:
        read(tmp_path)
    typed = str(error.value).rpartition("axis: ")[2].replace("FILE", "digits.mat").replace("NAME", "x")
    exec(typed, {"numpy": np, "scipy": scipy})
    np.testing.assert_array_equal(read(tmp_path).images[:], images.transpose(0, 3, 1, 2))
