"""All losses are computed in at least float32, also inside autocast."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fedssl.losses.examples import LOSSES
from tests.fedssl.losses.vectors import draw


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_autocast_does_not_lower_the_precision(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    """Low-precision outputs are widened first, and the products inside stay in float32."""
    z1, z2 = (z.to(torch.bfloat16).to(dtype) for z in draw(16, 32))
    expected = loss(z1.double(), z2.double())
    assert expected.dtype == torch.float64
    with torch.autocast("cpu", dtype=dtype):
        for a, b in ((z1, z2), (z1.float(), z2.float())):
            value = loss(a, b)
            assert value.dtype == torch.float32
            assert value.item() == pytest.approx(expected.item(), rel=1e-5)
