"""Several NPZ files as one data set: `fedssl.datasets.npz_files`."""

import numpy as np
import pytest
import torch

from fedssl.errors import InputError
from tests.fedssl.datasets.test_npz import GRAY, several, split_of_folder

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


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
