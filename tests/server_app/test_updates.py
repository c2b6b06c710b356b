"""Which updates are no honest client's, by how far they moved and by their statistics."""

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.wire.messages import ClientUpdate
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
