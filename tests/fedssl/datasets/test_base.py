"""Settings of data sets, subsets and splits."""

import inspect

import numpy as np
import pytest
from hydra.utils import get_method

from fedssl.datasets.base import check_data_settings, subsample_indices
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


def test_choose_is_fixed_sorted_and_without_repetition() -> None:
    assert subsample_indices(5, None).tolist() == subsample_indices(5, 9).tolist() == [0, 1, 2, 3, 4]
    some = subsample_indices(1000, 100)
    assert np.array_equal(some, subsample_indices(1000, 100))
    assert (np.diff(some) > 0).all()
    assert abs(some.mean() - 500) < 100  # from everywhere: the mean of 100 draws has standard deviation 27
