"""Training on many images, which are not in the memory of the process."""

import pytest

from benchmarks.images import memory


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [30_000, pytest.param(100_000, marks=pytest.mark.heavy)])
def test_images_of_64_x_64_are_trained_in_a_tenth_of_4_gib(num_images, tmp_path):
    # Decoded, 100,000 are 10^5 * 3 * 64 * 64 bytes = 1.14 GiB, and 30,000 are 0.34; the rest needs 0.27.
    assert memory(num_images, tmp_path) < 0.1 * 4 * 2**30
