"""Masks and quantized vectors: equal to Flower's where it has them, and to the stream of the standard."""

import base64

import numpy as np
import pytest
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.quantization import quantize as flower_quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fedssl.secure_aggregation.masks import add_mask, dequantized_mean, quantize, rounding_generator

LENGTH = 40_000  # more than two blocks
SEED = bytes(range(32))


def make_mask(seed, length, generator):
    mask = np.zeros(length, np.uint32)
    add_mask(mask, seed, generator=generator, sign=1)
    return mask


@pytest.mark.parametrize("seed", [SEED, base64.urlsafe_b64encode(SEED)])
def test_masks_of_mt19937_equal_flowers(seed):
    """Flower masks the weight and the vector with one generator."""
    weight, vector = pseudo_rand_gen(seed, 1 << 32, [(1,), (LENGTH,)])
    assert np.array_equal(make_mask(seed, LENGTH + 1, "mt19937"), np.concatenate([weight, vector]))


def test_masks_of_chacha20_are_the_key_stream():
    """RFC 8439, A.1, test vectors 1 and 2: the first two blocks of a zero key and nonce."""
    stream = make_mask(bytes(32), 32, "chacha20").astype("<u4").tobytes()
    assert stream[:16].hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert stream[64:80].hex() == "9f07e7be5551387a98ba977c732d080d"
    assert np.array_equal(make_mask(SEED, 100, "chacha20"), make_mask(base64.urlsafe_b64encode(SEED), 100, "chacha20"))


@pytest.mark.parametrize("generator", ["chacha20", "mt19937"])
def test_a_mask_is_added_and_removed_modulo_2_32(generator):
    start = np.arange(LENGTH, dtype=np.uint32) * np.uint32(100_003)
    total, mask = start.copy(), make_mask(SEED, LENGTH, generator)
    add_mask(total, SEED, generator=generator, sign=1)
    assert np.array_equal(total, (start.astype(np.int64) + mask) % 2**32)
    assert mask.astype(float).mean() == pytest.approx(2**31, rel=5 / np.sqrt(3 * LENGTH))
    add_mask(total, SEED, generator=generator, sign=-1)
    assert np.array_equal(total, start)


def test_quantized_vectors_and_means_equal_flowers(monkeypatch):
    delta = np.random.default_rng(0).normal(0, 3, LENGTH)
    assert (abs(delta) > 8).any()
    draws = np.random.default_rng(1).random(LENGTH)
    monkeypatch.setattr(np.random, "rand", lambda *shape: draws)
    (expected,) = flower_quantize([delta], 8.0, 1 << 22)
    found = quantize(delta, np.random.default_rng(1), clipping_range=8.0, target_range=1 << 22)
    assert found.dtype == np.uint32
    assert np.array_equal(found, expected)
    total = 3 * found.astype(np.int64)
    (vector,) = dequantize([total], 8.0, 1 << 22)
    vector += -2 * 8.0
    vector *= (1 << 22) / (3 * (1 << 22))
    mean = dequantized_mean(total, clients=3, total_weight=3 << 22, clipping_range=8.0, target_range=1 << 22)
    assert np.array_equal(mean, vector)


def test_rounding_is_unbiased_and_depends_on_the_vector_alone():
    """A quarter of a step is rounded up with probability 1/4: 40,000 draws, five standard deviations."""
    step = 2 * 8.0 / (1 << 22)
    delta = np.full(LENGTH, 0.25 * step)
    rounded = quantize(delta, rounding_generator(delta), clipping_range=8.0, target_range=1 << 22) - (1 << 21)
    assert set(rounded) == {0, 1}
    assert abs(rounded.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / LENGTH)
    assert rounding_generator(delta).random() == rounding_generator(delta.copy()).random()
    assert rounding_generator(delta).random() != rounding_generator(2 * delta).random()
