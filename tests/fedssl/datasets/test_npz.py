"""Arrays of images in NPZ files."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.datasets.base import load_split
from fedssl.datasets.folder import read
from fedssl.errors import InputError
from tests.fedssl.datasets.made import settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")

RANDOM = np.random.default_rng(0)
GRAY = RANDOM.integers(0, 256, (6, 4, 4), dtype=np.uint8)
RGB = RANDOM.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)


def save(folder: Path, **arrays: np.ndarray) -> str:
    file = folder / "data.npz"
    np.savez_compressed(file, **arrays)
    return str(file)


def test_a_file_of_medmnist(tmp_path):
    path = save(
        tmp_path,
        train_images=RGB,
        val_images=RGB[:2],
        test_images=RGB[:3],
        train_labels=np.array([[2], [0], [1], [1], [0], [2]], ">i4"),
        val_labels=np.zeros((2, 1), np.uint8),
        test_labels=np.array([[1], [2], [0]], np.uint8),
    )
    data = settings_of("medmnist", path=path, size=4)
    train, test = load_split(data, "train"), load_split(data, "test")
    assert torch.equal(train.images[:], torch.from_numpy(RGB).permute(0, 3, 1, 2))
    assert (train.labels.tolist(), test.labels.tolist()) == ([2, 0, 1, 1, 0, 2], [1, 2, 0])
    assert load_split(settings_of("medmnist", path=path, size=4, limit=3), "train").images.shape == (3, 3, 4, 4)


@pytest.mark.parametrize(
    "images", [GRAY, GRAY[..., None], GRAY[:, None], GRAY.astype(np.uint16) * 257], ids=["3", "4", "first", "uint16"]
)
def test_gray_images_in_any_order(tmp_path, images):
    path = save(tmp_path, x_train=images, y_train=np.arange(6))
    window = [0, 65535] if images.dtype == np.uint16 else None
    made = read("train", channels=1, size=4, limit=None, path=path, image="x", label="y", window=window, dtype="uint8")
    assert made.images[:][:, 0].tolist() == GRAY.tolist()
    rgb = read("train", channels=3, size=4, limit=None, path=path, image="x", label=None, window=window, dtype="uint8")
    assert rgb.labels is None
    assert (rgb.images[:] == made.images[:]).all()
    assert read("test", channels=1, size=4, limit=None, path=path, image="x", label="y") is None


def test_signed_values_and_floats_have_a_window(tmp_path):
    values = np.array([[[-2000, -1000], [0, 1000]]])
    for kind in (np.int16, np.int64, np.float64):
        path = save(tmp_path, train_images=values.astype(kind))
        made = read("train", channels=1, size=2, limit=None, path=path, label=None, window=[-1000, 1000], dtype="uint8")
        assert made.images[:].tolist() == [[[[0, 0], [127, 255]]]]  # 255.999 (x + 1000) / 2000
        message = r"from -2000 to 1000, without a known range; set dataset.window=\[LOWEST,HIGHEST\]"
        with pytest.raises(InputError, match=message):
            read("train", channels=1, size=2, limit=None, path=path, label=None)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": GRAY}, "has no array whose name contains 'images'"),
        ({"train_images": GRAY[0]}, r"train_images has shape \(4, 4\)"),
        ({"train_images": np.zeros((2, 4, 4, 4, 1), np.uint8)}, r"train_images has shape \(2, 4, 4, 4, 1\)"),
        ({"train_images": np.array(["a"] * 16).reshape(1, 4, 4)}, "and dtype <U1"),
        ({"train_images": GRAY, "train_labels": np.zeros((6, 14), np.uint8)}, "set dataset.label=null"),
        ({"train_images": GRAY, "train_labels": np.zeros(5, np.uint8)}, "but 6 images have one class each"),
        ({"train_images": GRAY, "train_labels": np.zeros((6, 2), np.uint8)}, r"label=null .*columns=\[labels\]"),
        ({"train_images": GRAY, "train_labels": np.zeros(6, complex)}, "dtype complex128; labels are integers or text"),
        ({"train_images": GRAY, "train_images_28": GRAY}, "has several arrays of the split 'train'"),
    ],
)
def test_unsuitable_arrays(tmp_path, arrays, message):
    with pytest.raises(InputError, match=message):
        read("train", channels=1, size=4, limit=None, path=save(tmp_path, **arrays))


def header(shape: tuple[int, ...]) -> bytes:
    """An NPY file that declares this shape and has no numbers."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"shape": shape, "fortran_order": False, "descr": "|u1"})
    return stream.getvalue()


def zipped(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return stream.getvalue()


def pickled() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, train_images=GRAY, train_labels=np.array([{}] * len(GRAY), object))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickled(), r"train_labels holds Python objects, .*; save it with train_labels\.astype\(str\)$"),
        (b"not an archive", "cannot be read as NPZ"),
        (zipped("train_images.npy", header((10**7, 10**4, 10**4))), "needs 1000000.0 GB of memory, more than half"),
        (zipped("train_images.npy", header((10, 4, 4))), "cannot be read as NPZ"),
        (zipped("train_images.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 2), "cannot be read as NPZ"),
    ],
    ids=["pickle", "text", "bomb", "cut", "header"],
)
def test_malicious_files(tmp_path, content, message):
    file = tmp_path / "data.npz"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read("train", channels=1, size=4, limit=None, path=str(file))


def test_a_missing_path():
    with pytest.raises(InputError, match=r"give dataset.path=FOLDER_OR_FILE"):
        read("train", channels=1, size=4, limit=None, path=None)
    with pytest.raises(InputError, match=r"/missing.npz is not a folder, a file or a pattern"):
        read("train", channels=1, size=4, limit=None, path="/missing.npz")


@pytest.mark.parametrize(
    ("written", "labels", "classes"),
    [
        (np.array(["b", "a", "b", "", "a", "c"], object).astype(str), [1, 0, 1, -1, 0, 2], ("a", "b", "c", "d")),
        (np.array([1.0, 0.0, np.nan, 3.0, -1.0, 2.0]), [1, 0, -1, 3, -1, 2], ()),
        (np.array([True, False] * 3), [1, 0] * 3, ()),
    ],
    ids=["names", "floats", "bools"],
)
def test_labels_are_names_or_numbers(tmp_path, written, labels, classes):
    """The names X and y are scikit-learn's. Without a test the validation is it."""
    test = np.array(["d"] * 2) if classes else written[:2]
    path = save(tmp_path, X_train=GRAY, y_train=written, X_val=GRAY[:2], y_val=test, y_names=np.array(["x"] * 9))
    train, val = (read(split, channels=1, size=4, limit=None, path=path) for split in ("train", "test"))
    assert (train.labels.tolist(), train.classes) == (labels, classes)
    assert val.labels.tolist() == ([3, 3] if classes else labels[:2])
    assert any("have no label" in warning for warning in train.warnings) == (-1 in labels)


def several(folder: Path, **files: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    for name, arrays in files.items():
        np.savez(folder / f"{name}.npz", **arrays)
    return folder


def split_of_folder(path: Path, split: str = "train", **changes: object):
    settings = {"channels": 1, "mean": [0.5], "std": [0.5], "size": 4, "cache": None, "test_fraction": 0.0}
    return load_split(settings_of("folder", path=str(path), **settings | changes), split)


def test_groups_and_owners_are_arrays(tmp_path):
    """A setting that names none is an error: groups would be on both sides of the holdout."""
    patients = np.array(["p", "p", "q", "q", "r", "r"])
    path = several(tmp_path / "data", all={"images": GRAY, "labels": np.arange(6) % 2, "patient": patients})
    data = split_of_folder(path, owner="patient", group="patient")
    numbers = [0, 0, 1, 1, 2, 2]
    assert (data.owners.tolist(), data.owner_names, data.groups.tolist()) == (numbers, ("p", "q", "r"), numbers)
    train, test = (split_of_folder(path, split, group="patient", test_fraction=0.3) for split in ("train", "test"))
    assert ({*train.groups.tolist()} & {*test.groups.tolist()}, len(test.images)) == (set(), 2)
    for setting in ("owner", "group"):
        with pytest.raises(InputError, match=r"has no array whose name contains 'scene'"):
            split_of_folder(path, **{setting: "scene"})
    path = several(tmp_path / "short", all={"images": GRAY, "patient": patients[:3]})
    with pytest.raises(InputError, match=r"patient has no text or integer for each of the 6 images"):
        split_of_folder(path, group="patient")


@pytest.mark.parametrize("storage", ["decoded", "encoded"])
def test_several_files_are_one_data_set(tmp_path, storage):
    """One per client, with other classes each."""
    first = {"images": GRAY[:2], "labels": np.array(["b", "a"]), "note": np.array([1, 2])}
    other = {"images": GRAY[2:5], "labels": np.array(["c", "a", "c"]), "note": np.array([3, 4, 5])}
    path = several(tmp_path / "data", client_0=first, client_1=other)
    data = split_of_folder(path, storage=storage, folders="owner")
    assert torch.equal(data.images[:][:, 0], torch.from_numpy(GRAY[:5]))
    assert [data.classes[label] for label in data.labels] == list("bacac")
    assert data.owner_names == ("client_0", "client_1")
    assert data.owners.tolist() == [0, 0, 1, 1, 1]
    index = data.origin[0].at(np.array([1, 3]))
    assert index.values("note") == [2, 4]
    assert [place.part for place in index.places(np.arange(2))] == ["images, 1"] * 2
    assert index.image_name(1).endswith("client_1.npz[images, 1]")
    limited = split_of_folder(path, storage=storage, limit=3)
    assert (len(limited.images), limited.owners) == (3, None)


def test_several_files_of_splits(tmp_path):
    train, test = {"x_train": GRAY[:4], "y_train": [0, 1, 2, 0]}, {"x_test": GRAY[4:], "y_test": [1, 2]}
    path = several(tmp_path / "data", train=train, test=test)
    assert split_of_folder(path).labels.tolist() == [0, 1, 2, 0]
    data = split_of_folder(path, "test", test_fraction=0.5)
    assert (data.labels.tolist(), len(data.images)) == ([1, 2], 2)
    alike = {"images": GRAY, "labels": np.arange(6) % 2}
    path = several(tmp_path / "alike", a=alike, b=alike)
    shares = [split_of_folder(path, split, test_fraction=0.5).labels.tolist() for split in ("train", "test")]
    assert (sum(map(len, shares)), [sum(share) for share in shares]) == (12, [3, 3])


@pytest.mark.parametrize("arrays", [{"train_images": GRAY, "test_images": GRAY}, {"test_images": GRAY}])
def test_several_data_sets_are_not_joined(tmp_path, arrays):
    """Files of MedMNIST side by side have classes of the same numbers, and images of the test in each."""
    path = several(tmp_path / "data", bloodmnist=arrays, pathmnist=arrays)
    with pytest.raises(InputError, match=r"holds 2 NPZ files, and bloodmnist\.npz has .*; give one of these files"):
        split_of_folder(path)
