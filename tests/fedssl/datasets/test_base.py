"""Settings of data sets, subsets and splits."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from hydra.utils import get_method

from fedssl.config.component import Component
from fedssl.datasets.base import ImageData, check_data_settings, find_changes, load_federated, subsample_indices
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from tests.fedssl.datasets.made import NAMES, node_of, settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


@pytest.mark.parametrize("name", NAMES)
def test_yaml_has_static_keys_and_the_reader_others(name: str) -> None:
    settings = settings_of(name)
    check_data_settings(settings)
    assert settings.num_classes is None or settings.num_classes > 1
    assert set(node_of(name).splits) == {"federated", "train", "test"}
    own = set(settings.reader.values) - {"_target_"}
    parameters = set(inspect.signature(get_method(settings.reader.target)).parameters) - {"split", "limit"}
    assert own == parameters if name == "digits" else own <= parameters
    if name == "folder":
        assert own == parameters - {"hub"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 65}, r"^dataset\.channels=65 must be at most 64$"),
        (
            {"channels": 1},
            r"^dataset\.mean=\[0\.4914, 0\.4822, 0\.4465\] has 3 numbers but dataset\.channels=1; set one ",
        ),
        (
            {"std": [1.0, 0.0, 1.0]},
            r"^dataset\.std=\[1\.0, 0\.0, 1\.0\] must be a list of numbers above 0 and at most 100000$",
        ),
        ({"size": 0}, r"^dataset\.size=0 must be an integer from 1 to 4096$"),
        ({"limit": 0}, r"^dataset\.limit=0 must be an integer of at least 1, or null$"),
        ({"test_limit": -1}, r"^dataset\.test_limit=-1 must be an integer of at least 1, or null$"),
    ],
)
def test_contradicting_settings_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_data_settings(settings_of("cifar10", **changes))


def custom(split: str, *, limit: int | None) -> object:
    """Return what `RETURNED` has, as a reader of a user does."""
    return RETURNED[0]


RETURNED: list[object] = []
PIXELS = torch.rand(6, 1, 8, 8)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: (PIXELS, None), "custom returns a tuple; return fedssl.datasets.base.ImageData"),
        (
            lambda: ImageData(PIXELS, None),
            "custom returns images as Tensor; return fedssl.datasets.images",
        ),
        (lambda: ImageData(TensorImages(PIXELS.double()), None), "returns images of dtype float64; return uint8, "),
        (
            lambda: ImageData(TensorImages(255 * PIXELS), None),
            r"float32 images from \S+ to 2\S+; return values in",
        ),
        (lambda: ImageData(TensorImages(PIXELS * torch.nan), None), "float32 images from nan to nan"),
        (
            lambda: ImageData(TensorImages(PIXELS[..., :7]), None),
            r"shape \(6, 1, 8, 7\); return one or more of shape",
        ),
        (lambda: ImageData(TensorImages(PIXELS[:0]), None), r"of shape \(0, 1, 8, 8\); return one or more"),
        (
            lambda: ImageData(TensorImages(PIXELS), [0] * 6),
            r"labels as list; return torch.int64 of shape \(6,\), or",
        ),
        (
            lambda: ImageData(TensorImages(PIXELS), torch.zeros(6)),
            r"labels as torch.float32 of shape \(6,\); return",
        ),
        (lambda: ImageData(TensorImages(PIXELS), torch.arange(5)), r"labels as torch.int64 of shape \(5,\); return"),
        (lambda: ImageData(TensorImages(PIXELS), torch.zeros(6, 1).long()), r"of shape \(6, 1\); return torch.int64"),
    ],
)
def test_what_a_reader_returns_is_checked(make, sentence, monkeypatch) -> None:
    monkeypatch.setattr(f"{__name__}.RETURNED", [make()])
    data = replace(settings_of("digits"), reader=Component({"_target_": f"{__name__}.custom"}))
    find_changes()
    with pytest.raises(InputError, match=sentence):
        load_federated(data)


@pytest.mark.parametrize(
    ("images", "found"),
    [(np.zeros((6, 1, 8, 8), np.uint8), "a ndarray"), (PIXELS[:, 0], r"of shape \(6, 8, 8\)")],
    ids=["NumPy", "no channels"],
)
def test_images_of_no_tensor_of_four_axes_are_refused(images, found) -> None:
    with pytest.raises(InputError, match=f"^images are {found}; give a tensor of shape"):
        TensorImages(images)


def test_choose_is_fixed_sorted_and_without_repetition() -> None:
    assert subsample_indices(5, None).tolist() == subsample_indices(5, 9).tolist() == [0, 1, 2, 3, 4]
    some = subsample_indices(1000, 100)
    assert np.array_equal(some, subsample_indices(1000, 100))
    assert (np.diff(some) > 0).all()
    assert abs(some.mean() - 500) < 100  # from everywhere: the mean of 100 draws has standard deviation 27
