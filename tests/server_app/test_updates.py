"""Which updates are no honest client's, by how far they moved and by their statistics."""

from contextlib import nullcontext

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.wire.messages import ClientUpdate
from server_app.updates import RoundResult
from server_app.validation import InvalidUpdate
from tests.server_app.small import update_validator


def test_no_variance_is_negative():
    def check(variance):
        layers = {"bn.running_var": np.array(variance, dtype=np.float32)}
        update = ClientUpdate(layers=layers, partition_id=0, plan_id=(1, "x"))
        expected = GlobalLayers({"bn.running_var": np.ones(2, dtype=np.float32)})
        update_validator().check(update, round=1, expected=expected)

    check([0.0, 1.0])
    with pytest.raises(InvalidUpdate, match="layer bn.running_var has a negative variance"):
        check([1.0, -0.001])


@pytest.mark.parametrize(("value", "is_valid"), [(2**53, True), (2**53 + 1, False), (-(2**63), False)])
def test_integer_layers_have_an_exact_mean(value, is_valid):
    layers = {"bn.num_batches_tracked": np.array(value)}
    update = ClientUpdate(layers=layers, partition_id=0, plan_id=(1, "x"))
    with (
        nullcontext() if is_valid else pytest.raises(InvalidUpdate, match="bn.num_batches_tracked has integers beyond")
    ):
        update_validator().check(update, round=1, expected=GlobalLayers({"bn.num_batches_tracked": np.array(0)}))
    update_validator().check(update, round=1, expected=GlobalLayers(layers))  # a constant may have any


def test_a_message_lists_few_of_thousands_of_clients():
    result = RoundResult(3, dropped=dict.fromkeys(range(5000), "no reply in time") | {7: "it failed"})
    assert result.too_few(5000, needed=1) == (
        "round 3: none of 5000 clients sent a usable update (client 0, 1, 2, 3, 4, 5, 6, 8 and 4,991 more: no reply in "
        "time; client 7: it failed)"
    )
