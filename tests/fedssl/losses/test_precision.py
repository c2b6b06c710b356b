"""All losses are computed in at least float32, also inside autocast."""

import pytest
import torch

from fedssl.losses import barlow_twins, byol, info_nce, nt_xent
from tests.fedssl.losses.vectors import draw


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: nt_xent(a, b, temperature=0.07),
        lambda a, b: info_nce(a, b, temperature=0.07),
        lambda a, b: barlow_twins(a, b, lambd=0.005),
        lambda a, b: byol(a, b, b, a),
    ],
    ids=["nt_xent", "info_nce", "barlow_twins", "byol"],
)
def test_autocast_does_not_lower_the_precision(loss) -> None:
    """Low-precision projections are widened first, and the products inside stay in float32."""
    z1, z2 = (z.to(torch.bfloat16) for z in draw(16, 32))
    expected = loss(z1.double(), z2.double()).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in ((z1, z2), (z1.float(), z2.float())):
            value = loss(a, b)
            assert value.dtype == torch.float32
            assert value.item() == pytest.approx(expected, rel=1e-5)
