"""Seeds: a function of the run's seed and the path, in every process."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedssl.seeding import derive_seed, numpy_generator, python_seed, seed_generators, torch_generator

PATHS = [(), ("train",), ("train", 1), ("train", 2), ("train", 1, 2), ("train", 12), ("niart", 1), (1, "train")]


def test_seeds_are_those_of_every_version():
    # 0x6e61 is "an" in little-endian order, by NumPy's documented `SeedSequence`, less the sign bit.
    (expected,) = np.random.SeedSequence([3, 0x6E61, 7]).generate_state(1, np.uint64)
    assert derive_seed(3, "an", 7) == int(expected) >> 1
    assert derive_seed(0, "train", 1, 2) == 7_663_366_298_219_528_478


def test_every_path_and_seed_has_its_own_draws():
    seeds = sorted(derive_seed(seed, *path) for seed in (0, 1) for path in PATHS)
    assert all(one < other for one, other in pairwise(seeds))
    assert seeds[0] >= 0
    assert seeds[-1] < 2**63
    for make in (numpy_generator, torch_generator):
        first, again, other = (make(0, "train", round) for round in (1, 1, 2))
        draw = (lambda one: one.random()) if make is numpy_generator else (lambda one: torch.rand((), generator=one))
        assert draw(first) == draw(again) != draw(other)


def test_all_global_generators_are_seeded():
    draws = []
    for seed in (2**62 + 1, 2, 2**62 + 1):
        seed_generators(seed, torch.device("cpu"))
        draws.append((random.random(), np.random.random(), torch.rand(()).item()))
    assert draws[0] == draws[2]
    assert all(one != other for one, other in zip(draws[0], draws[1], strict=True))


@pytest.mark.parametrize("seed", [3, None])
def test_draws_continue_after_a_seeded_block(seed):
    seed_generators(5, torch.device("cpu"))
    expected = [(random.random(), np.random.random()) for _ in range(2)]
    seed_generators(5, torch.device("cpu"))
    found = [(random.random(), np.random.random())]
    with python_seed(seed):
        inside = random.random(), np.random.random()
        assert (inside == expected[1]) == (seed is None)
    assert [*found, (random.random(), np.random.random())] == expected
