"""Files of `torchvision.datasets`, made here with their checksums."""

import hashlib
import pickle
import shlex
import shutil
import struct
import subprocess
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100, MNIST, STL10, SVHN

from fedssl.datasets.base import forget_images, load_federated, load_split
from fedssl.datasets.torchvision_files import class_of
from fedssl.errors import InputError
from tests.fedssl.datasets.made import settings_of, table
from tests.fedssl.test_safe_io import Calls

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")

RANDOM = np.random.default_rng(0)
COLOR = RANDOM.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
GRAY = RANDOM.integers(0, 256, (6, 28, 28), dtype=np.uint8)


def md5_of(file):
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "torch vision"


@pytest.fixture
def cifar10(root, monkeypatch):
    """Two batches of four images for training, and one of two for the test."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, rows in (("data_batch_1", slice(0, 4)), ("data_batch_2", slice(4, 8)), ("test_batch", slice(8, 10))):
        content = {"data": COLOR[rows].reshape(-1, 3072), "labels": [*range(10)][rows]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [*"abcdefghij"]}, protocol=2))
    files = {file.name: [file.name, md5_of(file)] for file in sorted(folder.iterdir())}
    monkeypatch.setattr(CIFAR10, "train_list", [files["data_batch_1"], files["data_batch_2"]])
    monkeypatch.setattr(CIFAR10, "test_list", [files["test_batch"]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": files["batches.meta"][1]})
    return folder


@pytest.mark.parametrize("storage", ["decoded", "encoded"])
@pytest.mark.parametrize("name", ["cifar10", "folder"])
@pytest.mark.parametrize("is_root", [False, True])
def test_pickles_of_cifar10(root, cifar10, name, is_root, storage):
    path = str(root if is_root else cifar10)
    data = settings_of(name, path=path, size=32, torchvision="CIFAR10", storage=storage)
    train, test = load_split(data, "train"), load_split(data, "test")
    assert torch.equal(train.images[:], torch.from_numpy(COLOR[:8]))
    assert torch.equal(test.images[:], torch.from_numpy(COLOR[8:]))
    assert (train.labels.tolist(), test.labels.tolist()) == ([*range(8)], [8, 9])
    assert train.classes == test.classes == (*"abcdefghij",)
    assert train.origin[0].image_name(0) != test.origin[0].image_name(0)
    limited = load_split(settings_of(name, path=path, size=32, torchvision="CIFAR10", limit=3), "train")
    assert torch.equal(limited.images[:], torch.from_numpy(COLOR)[limited.labels])
    assert len(limited.labels) == 3


def test_another_pickle_is_not_opened(cifar10):
    (cifar10 / "data_batch_1").write_bytes(pickle.dumps(Calls(pytest.fail, "a pickle was executed")))
    with pytest.raises(InputError, match="files of torchvision's CIFAR10 are missing or damaged; unpack its arch"):
        load_split(settings_of("cifar10", path=str(cifar10)), "train")


def test_fine_labels_of_cifar100(root, monkeypatch):
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, rows in (("train", slice(0, 6)), ("test", slice(6, 10))):
        content = {"data": COLOR[rows].reshape(-1, 3072), "fine_labels": [99, *range(9)][rows], "coarse_labels": []}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(label) for label in range(100)]}, protocol=2))
    files = {file.name: [file.name, md5_of(file)] for file in folder.iterdir()}
    monkeypatch.setattr(CIFAR100, "train_list", [files["train"]])
    monkeypatch.setattr(CIFAR100, "test_list", [files["test"]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": files["meta"][1]})
    assert load_split(settings_of("cifar100", path=str(root)), "train").labels.tolist() == [99, 0, 1, 2, 3, 4]
    with pytest.raises(
        InputError, match="dataset.label=coarse_label is not in torchvision's files of CIFAR100; remove"
    ):
        load_split(settings_of("cifar100", path=str(root), label="coarse_label"), "train")


def test_digits_of_svhn(root, monkeypatch):
    """The label of the digit 0 is 10 in the files."""
    scipy_io = pytest.importorskip("scipy.io")
    root.mkdir()
    for split, rows in (("train", slice(0, 6)), ("test", slice(6, 10))):
        file = root / f"{split}_32x32.mat"
        labels = np.array([[10], [1], [2], [3], [4], [5], [10], [9], [8], [7]], np.uint8)[rows]
        scipy_io.savemat(file, {"X": COLOR[rows].transpose(2, 3, 1, 0), "y": labels})
        monkeypatch.setitem(SVHN.split_list, split, ["", file.name, md5_of(file)])
    for path in (root, root / "train_32x32.mat"):
        data = settings_of("svhn", path=str(path))
        train, test = load_split(data, "train"), load_split(data, "test")
        assert torch.equal(train.images[:], torch.from_numpy(COLOR[:6]))
        assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 9, 8, 7])


def test_unlabeled_images_of_stl10(root, monkeypatch):
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    images = RANDOM.integers(0, 256, (5, 3, 96, 96), dtype=np.uint8)  # in columns in the files
    for name, rows in (("train", slice(0, 2)), ("test", slice(2, 3)), ("unlabeled", slice(3, 5))):
        (folder / f"{name}_X.bin").write_bytes(images[rows].transpose(0, 1, 3, 2).tobytes())
        (folder / f"{name}_y.bin").write_bytes(bytes([1, 10, 3, 0, 0][rows]))
    (folder / "class_names.txt").write_text("airplane\nbird\n")
    (folder / "unlabeled_y.bin").unlink()
    files = {file.name: [file.name, md5_of(file)] for file in folder.iterdir()}
    monkeypatch.setattr(STL10, "train_list", [files[f"{one}.bin"] for one in ("train_X", "train_y", "unlabeled_X")])
    monkeypatch.setattr(STL10, "test_list", [files["test_X.bin"], files["test_y.bin"]])
    data = settings_of("stl10", path=str(root))
    clients, train = load_federated(data), load_split(data, "train")
    assert torch.equal(clients.images[:], torch.from_numpy(images[3:]))
    assert clients.labels is None
    assert (train.labels.tolist(), load_split(data, "test").labels.tolist()) == ([0, 9], [2])


def write_idx(root, name):
    folder = root / name / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, rows in (("train", slice(0, 4)), ("t10k", slice(4, 6))):
        images, labels = GRAY[rows], np.array([5, 0, 4, 1, 9, 2], np.uint8)[rows]
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, *images.shape) + images.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, len(labels)) + labels.tobytes())
    return settings_of("folder", path=str(root), torchvision=name, size=28, channels=1, mean=[0.5], std=[0.5])


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST", "KMNIST"])
def test_gray_images_of_idx_files(root, name):
    data = write_idx(root, name)
    train, test = load_split(data, "train"), load_split(data, "test")
    assert torch.equal(train.images[:][:, 0], torch.from_numpy(GRAY[:4]))
    assert (train.labels.tolist(), test.labels.tolist()) == ([5, 0, 4, 1], [9, 2])
    assert len(test.classes) == 10
    assert class_of(str(root / name / "raw")) == class_of(str(root)) == name


@pytest.mark.parametrize(
    "labels",
    [
        bytes(12),
        struct.pack(">2i", 2049, 3) + bytes(3),
        struct.pack(">2i", 2049, 9) + bytes(9),
        struct.pack(">i", 2561),
    ],
    ids=["zeros", "few", "many", "type"],
)
def test_damaged_labels_of_idx_files_are_one_sentence(root, labels):
    data = write_idx(root, "MNIST")
    (root / "MNIST/raw/train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(InputError, match="MNIST/raw: files of torchvision's MNIST are missing or damaged; unpack"):
        load_split(data, "train")


def test_too_little_memory_is_no_damage(root, monkeypatch):
    data = write_idx(root, "MNIST")
    monkeypatch.setattr(MNIST, "_load_data", lambda self: bytearray(2**62))
    with pytest.raises(MemoryError):
        load_split(data, "train")


def test_changed_files_are_read_again(root):
    first = load_split(write_idx(root, "MNIST"), "train")
    file = root / "MNIST/raw/train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 255]))
    forget_images()
    again = load_split(settings_of("folder", path=str(root), torchvision="MNIST", size=28), "train")
    assert first.images[:][3, 0, 27, 27] == 255 - again.images[:][3, 0, 27, 27]


def test_long_patterns_are_no_folders(tmp_path):
    pq.write_table(table([0, 9], [3, 1]), tmp_path / "train-00.parquet")
    names = ",".join(f"train-{number:02}.parquet" for number in [0] * 30)
    data = settings_of("cifar10", path=f"{tmp_path}/{{{names}}}", size=4)
    assert load_split(data, "train").labels.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"torchvision": "cifar10"},
            "dataset.torchvision=cifar10 is not read; did you mean CIFAR10 or CIFAR100; allowed",
        ),
        (
            {"torchvision": "KMNIST"},
            r"has no KMNIST/raw of torchvision's KMNIST; give the root of torchvision.datasets.K",
        ),
        ({}, "holds no image .*; these are files of torchvision's CIFAR10: set dataset.torchvision=CIFAR10"),
        (
            {"torchvision": "CIFAR10", "splits": {"train": "trian"}},
            "torchvision's CIFAR10 has no split 'trian', only train, test; name one of them in dataset.splits",
        ),
        ({"torchvision": "CIFAR10", "owner": "user"}, "dataset.owner=user is a column, which torchvision's files lack"),
    ],
)
def test_wrong_settings_are_refused(root, cifar10, changes, message):
    with pytest.raises(InputError, match=message):
        load_split(settings_of("folder", path=str(root), **changes), "train")


@pytest.mark.parametrize("of_folder", [False, True])
def test_an_archive_is_unpacked_by_the_command_of_the_error(root, cifar10, of_folder):
    archive = root / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(cifar10, cifar10.name)
    shutil.rmtree(cifar10)
    with pytest.raises(InputError, match="is the archive of torchvision's CIFAR10; unpack it with") as error:
        load_split(settings_of("cifar10", path=str(root if of_folder else archive)), "train")
    command, _, setting = str(error.value).partition("unpack it with ")[2].partition(" and give ")
    subprocess.run(shlex.split(command), check=True)
    path = shlex.split(setting)[0].removeprefix("dataset.path=")
    assert load_split(settings_of("cifar10", path=path), "train").labels.tolist() == [*range(8)]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables_beside_the_archive_are_read(root, ending):
    root.mkdir()
    with tarfile.open(root / "cifar-10-python.tar.gz", "w:gz"):
        contents = table([0, 9], [3, 1])
    if ending == "parquet":
        pq.write_table(contents, root / "train.parquet")
    else:
        with pa.ipc.new_stream(root / "train.arrow", contents.schema) as writer:
            writer.write_table(contents)
    assert load_split(settings_of("cifar10", path=str(root), size=4), "train").labels.tolist() == [3, 1]


def test_files_of_another_data_set_are_not_read(root, cifar10):
    """Tiny ImageNet has the settings of CIFAR-10, but not its files."""
    with pytest.raises(
        InputError, match="holds no image .*; these are files of torchvision's CIFAR10: choose its data"
    ):
        load_split(settings_of("tiny_imagenet", path=str(root)), "train")
