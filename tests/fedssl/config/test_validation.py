"""Values of settings that no run can use."""

import pytest

from fedssl.config import load
from fedssl.errors import InputError


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["privacy=central", "privacy.delta=0.1"], "privacy.delta=0.1 .* must be below 1 / num_clients; set .*=0.01"),
        (["privacy=central", "num_clients=100000"], "delta=1e-05 .* below 1 / num_clients; set privacy.delta=1e-06 or"),
        (["method=swav", "method.epsilon=1e-320"], "method.epsilon=1e-320 must be at least 0.0001"),
        (["method=lejepa", "method.num_slices=2000000000"], "method.num_slices=2000000000 must be at most 65,536"),
        (["method.temperature=1e-5"], "method.temperature=1e-05 must be at least 0.0001"),
        (["optimizer.lr=1e300"], "optimizer.lr=1e.300 must be a number whose size is from"),
        (["optimizer.weight_decay=1e-310"], "optimizer.weight_decay=1e-310 must be a number whose size is from 1e-30"),
        (["num_clients=2000000000"], "num_clients=2000000000 must be at most 10,000,000"),
    ],
)
def test_unusable_numbers_are_refused_before_a_run(overrides, sentence):
    with pytest.raises(InputError, match=f"^.*{sentence}"):
        load.compose(overrides)
