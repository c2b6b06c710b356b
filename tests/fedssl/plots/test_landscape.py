"""The plane of a way through the space of weights: directions and places by hand."""

import numpy as np
import pytest

from fedssl.errors import InputError
from fedssl.plots.landscape import axes_around, principal_plane

# Deviations from the last model: (4, 0, 0, 0), (0, 3, 0, 0), (0, 0, 0, 0). Their squares are 16 + 9 = 25, so the first
# direction is (1, 0, 0, 0) with 16/25, the second (0, 1, 0, 0) with 9/25.
MODELS = np.array([[5.0, 1, 2, 0], [1, 4, 2, 0], [1, 1, 2, 0]])


def test_directions_and_places_by_hand():
    plane = principal_plane(MODELS)
    np.testing.assert_array_equal(plane.origin, [1, 1, 2, 0])
    np.testing.assert_allclose(plane.directions, [[1, 0, 0, 0], [0, 1, 0, 0]], atol=1e-12)
    assert plane.shares == pytest.approx((0.64, 0.36))
    np.testing.assert_allclose(plane.coordinates(MODELS), [[4, 0], [0, 3], [0, 0]], atol=1e-12)
    # (2, 2, 5, 7) deviates by (1, 1, 3, 7): what lies beside the plane is left out.
    np.testing.assert_allclose(plane.coordinates(np.array([[2.0, 2, 5, 7]])), [[1, 1]], atol=1e-12)
    np.testing.assert_allclose(plane.weights(2.0, -1.0), [3, 0, 2, 0], atol=1e-12)


def test_a_line_of_many_float32_weights_gives_no_plane():
    """Rounding of products in float32 is a share of 1e-7 of them, and would pass for a second direction."""
    random = np.random.default_rng(0)
    last, way = random.normal(0, 0.05, 10**6), random.normal(0, 0.01, 10**6)
    models = np.stack([last + step * way for step in (3, 2.2, 1.1, 0.3, 0)]).astype(np.float32)
    with pytest.raises(InputError, match="the models lie on a line"):
        principal_plane(models)


def test_grid_leaves_a_margin():
    # x goes from 0 to 4, and a margin of 0.25 is 1; y from -1 to 1, which is 0.5.
    x, y = axes_around(np.array([[0.0, -1], [4, 1], [2, 0]]), points=4, margin=0.25)
    np.testing.assert_allclose(x, [-1, 1, 3, 5])
    np.testing.assert_allclose(y, [-1.5, -0.5, 0.5, 1.5])
