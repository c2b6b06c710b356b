"""Very many pictures are trained on without being in the memory of the process."""

import pytest

from benchmarks.pictures import memory


@pytest.mark.slow
def test_100_000_pictures_of_64_x_64_are_trained_in_a_tenth_of_4_gib(tmp_path):
    # Decoded they are 10^5 * 3 * 64 * 64 bytes = 1.14 GiB.
    assert memory(100_000, tmp_path) < 0.1 * 4 * 2**30
