"""Data sets in parquet and arrow files, written by the tests, without network."""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedssl.datasets.base import find_changes, load_federated, load_split, subsample_indices
from fedssl.errors import InputError
from fedssl.evaluation.protocol import load_labeled
from tests.fedssl.datasets.made import first_pixels, make_image, settings_of, table

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training shards, a test shard and a fold that repeats training images, under the Hub's names."""
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(table([1, 2, 3], [0, 1, 2]), data / "train-00000-of-00002.parquet")
    pq.write_table(table([4, 5], [0, 1]), data / "train-00001-of-00002-1359597a978bc4fa.parquet")
    pq.write_table(table([1, 2], [0, 1]), data / "train_0-00000-of-00001.parquet")
    pq.write_table(table([9, 8], [2, 1]), data / "test-00000-of-00001.parquet")
    return tmp_path


def test_a_copy_of_a_repository_has_further_subsets(tmp_path: Path) -> None:
    for subset, values in (("cropped_digits", [1, 2]), ("full_numbers", [3, 4])):
        (tmp_path / subset).mkdir()
        pq.write_table(table(values, [0, 1], image="image"), tmp_path / subset / "train-00000-of-00001.parquet")
    for path in (tmp_path, tmp_path / "cropped_digits"):
        assert first_pixels(load_federated(settings_of("svhn", path=str(path), size=4)).images) == [1, 2]


def test_parquet_folder(folder: Path) -> None:
    settings = settings_of("cifar10", path=str(folder), size=4)
    train = load_federated(settings)
    assert train is load_split(settings, "train")
    assert train.images.shape == (5, 3, 4, 4)
    assert first_pixels(train.images) == [1, 2, 3, 4, 5]
    assert train.images[:][0, 2].flatten().tolist() == list(range(1, 17))
    assert train.labels.tolist() == [0, 1, 2, 0, 1]
    assert train.classes == ("ant", "bee", "cow")
    test = load_split(settings, "test")
    assert (first_pixels(test.images), test.labels.tolist()) == ([9, 8], [2, 1])


def test_a_changed_table_is_read_again(folder: Path) -> None:
    settings = settings_of("cifar10", path=str(folder), size=4)
    first, second = sorted((folder / "data").glob("train-*"))
    for values, place in (([1, 2, 3], (second, "0")), ([1, 2, 3, 6], (first, "3"))):
        pq.write_table(table(values, [0, 1, 2, 0][: len(values)]), first)
        find_changes()
        images = load_federated(settings)
        assert first_pixels(images.images) == [*values, 4, 5]
        assert images.origin[0].places(np.array([3])) == [place]


def test_splits_as_folders_and_unlabeled_images(tmp_path: Path) -> None:
    """The layout of the Hub's conversion; STL-10 marks unlabeled images with -1."""
    parts = {"unlabeled": ([1, 2, 3], [-1, -1, -1]), "train": ([4, 5], [0, 1]), "test": ([6], [2])}
    for name, (values, labels) in parts.items():
        (tmp_path / name).mkdir()
        pq.write_table(table(values, labels, image="image"), tmp_path / name / "0000.parquet")
    settings = settings_of("stl10", path=str(tmp_path), size=4)
    shared = load_federated(settings)
    assert first_pixels(shared.images) == [1, 2, 3]
    assert shared.labels is None
    assert load_split(settings, "train").labels.tolist() == [0, 1]
    assert load_split(settings, "test").labels.tolist() == [2]


def test_folder_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    splits = {
        name: datasets.Dataset.from_dict({"img": [make_image(v) for v in values], "label": labels}, features=features)
        for name, values, labels in (("train", [1, 2, 3], [0, 1, 0]), ("test", [7], [1]))
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    settings = settings_of("cifar10", path=str(tmp_path / "saved"), size=4)
    train, test = load_federated(settings), load_split(settings, "test")
    assert (first_pixels(train.images), train.labels.tolist()) == ([1, 2, 3], [0, 1, 0])
    assert (first_pixels(test.images), test.labels.tolist()) == ([7], [1])
    assert train.classes == ("ant", "bee")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_a_column_names_the_owners(tmp_path: Path, kind: pa.DataType) -> None:
    writers = [["w9", "w10"], ["w9", "w1", "w10"]]
    for number, (values, labels) in enumerate([([1, 2], [0, 1]), ([3, 4, 5], [2, 0, 1])]):
        contents = table(values, labels).append_column("writer_id", pa.array(writers[number]).cast(kind))
        pq.write_table(contents, tmp_path / f"train-{number}.parquet")
    settings = settings_of("cifar10", path=str(tmp_path), size=4, owner="writer_id")
    image_data = load_federated(settings)
    assert image_data.owner_names == ("w1", "w10", "w9")  # in the order of words
    assert image_data.owners.tolist() == [2, 1, 2, 0, 1]
    assert image_data.owners.dtype == torch.int64
    assert image_data.labels.tolist() == [0, 1, 2, 0, 1]
    limited = load_federated(settings_of("cifar10", path=str(tmp_path), size=4, owner="writer_id", limit=3))
    assert limited.owners.tolist() == image_data.owners[torch.from_numpy(subsample_indices(5, 3))].tolist()
    assert limited.owner_names == image_data.owner_names
    unknown = load_federated(settings_of("cifar10", path=str(tmp_path), size=4))
    assert (unknown.owners, unknown.owner_names) == (None, ())


def test_owners_that_pandas_made_floats_are_numbers(tmp_path: Path) -> None:
    contents = table([1, 2, 3], [0, 1, 0]).append_column("who", pa.array([12.0, 7.0, 12.0]))
    pq.write_table(contents, tmp_path / "train.parquet")
    owners = load_federated(settings_of("cifar10", path=str(tmp_path), size=4, owner="who"))
    assert [owners.owner_names[owner] for owner in owners.owners] == ["12", "7", "12"]


def test_owners_of_named_classes_are_joined_by_name(tmp_path: Path) -> None:
    """Each hospital has exported its own file, with its own numbers."""
    import datasets

    for number, names in enumerate((["b", "a"], ["c", "b"])):
        features = datasets.Features({"img": datasets.Image(), "who": datasets.ClassLabel(names=names)})
        rows = {"img": [make_image(2 * number), make_image(2 * number + 1)], "who": [0, 1]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"train-{number}.parquet")
    owners = load_federated(settings_of("cifar10", path=str(tmp_path), size=4, owner="who"))
    assert [owners.owner_names[owner] for owner in owners.owners] == ["b", "a", "c", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"group": "folder"},
            r"dataset\.group=folder but the images of .*train\.parquet are inside the file; name the",
        ),
        ({"pages": "all"}, r"dataset\.pages=all but the images of .*train\.parquet are inside the file, of which only"),
    ],
)
def test_what_images_inside_of_files_lack_is_refused(tmp_path: Path, changes, message: str) -> None:
    pq.write_table(table([1, 2], [0, 1]), tmp_path / "train.parquet")
    with pytest.raises(InputError, match=message):
        load_federated(settings_of("folder", path=str(tmp_path), size=4, channels=3, **changes))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, r"no column 'who' \(it has \['img', 'label'\]\).*dataset\.owner=null"),
        (pa.array([0.5, 1.0]), r"dataset\.owner=who is of type double; a column of integers or strings is needed"),
        (pa.array(["ann", None]), r"dataset\.owner=who has no value in 1 of 2 rows, first row 1 of .*give every image"),
    ],
)
def test_owners_that_cannot_be_used_are_one_sentence(tmp_path: Path, column: pa.Array | None, message: str) -> None:
    contents = table([1, 2], [0, 1])
    pq.write_table(contents if column is None else contents.append_column("who", column), tmp_path / "train.parquet")
    with pytest.raises(InputError, match=message) as caught:
        load_federated(settings_of("cifar10", path=str(tmp_path), size=4, owner="who"))
    assert "\n" not in str(caught.value)


def test_a_missing_label_column_is_logged_and_means_no_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pq.write_table(table([1, 2], [0, 1], label="target"), tmp_path / "train.parquet")
    settings = settings_of("cifar10", path=str(tmp_path), size=4)
    with caplog.at_level(logging.WARNING):
        assert load_federated(settings).labels is None
    assert "no column 'label'" in caplog.text
    assert load_labeled(settings, "train") is None


@pytest.mark.parametrize(
    ("name", "contents", "changes", "message"),
    [
        ("train.parquet", b"rubbish", {}, r"train\.parquet cannot be read"),
        ("train.arrow", b"rubbish", {}, r"train\.arrow cannot be read"),
        ("train.txt", b"", {}, r"holds no image \(ignored 1 file: 1 \.txt\); allowed are files ending in \.arrow"),
        (
            "test.parquet",
            table([1], [0]),
            {},
            r"has no split 'train', only test\.parquet; set dataset\.splits\.federated",
        ),
        ("train.parquet", table([1], [0], image="image"), {}, r"no column 'img' \(it has \['image', 'label'\]\)"),
        (
            "train.parquet",
            table([1, 2], [0, 2]),
            {"num_classes": 2},
            r"dataset\.num_classes=2 but the class 2 exists; set dataset\.num_classes=3",
        ),
        (
            "train.parquet",
            pa.table({"img": [b"", b"x"], "label": [0, 1]}),
            {},
            r"none of the 2 images can be read: .*\.parquet\[0\] \(the file is empty.*\[1\] \(it is no image of JPEG",
        ),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, name, contents, changes, message) -> None:
    if isinstance(contents, bytes):
        (tmp_path / name).write_bytes(contents)
    else:
        pq.write_table(contents, tmp_path / name)
    with pytest.raises(InputError, match=message):
        load_federated(settings_of("cifar10", path=str(tmp_path), size=4, **changes))


def test_hub_is_read_from_the_arrow_files_of_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": table([5, 6], [1, 0]), "validation": table([7], [1]), "test": table([8], [-1])}
    for split, contents in parts.items():
        with pa.ipc.new_stream(str(tmp_path / f"{split}.arrow"), contents.schema) as writer:
            writer.write_table(contents)
    asked = []

    class FederatedDataset:
        def __init__(self, *, dataset: str, partitioners: dict, shuffle: bool) -> None:
            asked.append((dataset, partitioners, shuffle))

        def load_split(self, split: str) -> SimpleNamespace:
            asked.append(split)
            return SimpleNamespace(cache_files=[{"filename": str(tmp_path / f"{split}.arrow")}])

    monkeypatch.setitem(sys.modules, "flwr_datasets", ModuleType("flwr_datasets"))
    monkeypatch.setattr(sys.modules["flwr_datasets"], "FederatedDataset", FederatedDataset, raising=False)
    image_data = load_federated(settings_of("cifar10", size=4))
    assert asked == [("uoft-cs/cifar10", {}, False), "train"]
    assert (first_pixels(image_data.images), image_data.labels.tolist()) == ([5, 6], [1, 0])
    assert first_pixels(load_split(settings_of("cifar10", size=4), "test").images) == [7]  # which has labels


def test_unreachable_hub_says_how_to_use_local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**_: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setitem(sys.modules, "flwr_datasets", ModuleType("flwr_datasets"))
    monkeypatch.setattr(sys.modules["flwr_datasets"], "FederatedDataset", unreachable, raising=False)
    with pytest.raises(InputError, match=r"uoft-cs/cifar100 .*Couldn't reach the Hub\).*dataset\.path=FILE_OR_FOLDER$"):
        load_federated(settings_of("cifar100"))


def test_real_cifar10_has_the_statistics_of_the_yaml(cifar10: str) -> None:
    settings = settings_of("cifar10", path=cifar10)
    image_data = load_split(settings, "test")
    assert image_data.images.shape == (10000, 3, 32, 32)
    assert torch.bincount(image_data.labels).tolist() == [1000] * 10
    assert image_data.classes[0] == "airplane"
    mean = image_data.images[:].float().mean(dim=(0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor(list(settings.mean)), atol=0.01)
