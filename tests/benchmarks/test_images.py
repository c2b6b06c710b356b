"""Training on many images, which are not in the memory of the process."""

import pytest

from benchmarks.images import measure, memory, write_images


@pytest.mark.heavy
def test_a_run_needs_less_memory_than_its_decoded_images(tmp_path):
    write_images(tmp_path / "data", 15_000)
    assert measure(tmp_path) < 15_000 * 3 * 64 * 64


@pytest.mark.heavy
def test_many_images_are_trained_in_a_tenth_of_memory(tmp_path):
    # Decoded, 100,000 are 10^5 * 3 * 64 * 64 bytes = 1.14 GiB.
    assert memory(100_000, tmp_path) < 0.1 * 4 * 2**30
