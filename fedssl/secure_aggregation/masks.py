r"""Quantized vectors modulo 2^32, and the pseudorandom masks that hide them.

``chacha20`` expands a seed of 256 bits with the stream cipher. ``mt19937`` is the generator of Flower 1.41: NumPy's
Mersenne Twister with the XOR of the seed's 32-bit words, of which a pairwise seed in base64 leaves 28 bits. It is no
cryptographic generator, and only for nodes that run Flower's own mod.

$$
y_u = x_u + \mathrm{PRG}(b_u) + \sum_{v \in N(u), v < u} \mathrm{PRG}(s_{uv})
- \sum_{v \in N(u), v > u} \mathrm{PRG}(s_{uv}) \pmod{2^{32}}
$$

with $x_u$ the quantized update of client u, $b_u$ its seed, and $s_{uv}$ the key that it shares with neighbor v.
"""

import base64

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from xxhash import xxh3_128_intdigest

MASK_GENERATORS = ("chacha20", "mt19937")
SEED_BITS = {"chacha20": 256, "mt19937": 28}  # of a pairwise mask
_KEY_BYTES = 32
_BLOCK = 1 << 14  # values that fit into the caches


def add_mask(total: np.ndarray, seed: bytes, *, generator: str, sign: int) -> None:
    """Add the mask of a seed to a uint32 vector in place, or subtract it if ``sign`` is negative.

    The seed is 32 bytes, or 32 bytes in base64.
    """
    operation = np.add if sign > 0 else np.subtract
    if generator == "mt19937":
        words = np.frombuffer(seed, "<u4")
        twister = np.random.RandomState(int(np.bitwise_xor.reduce(words)))
        operation(total, twister.randint(0, 2**32 - 1, len(total), dtype=np.uint32), out=total)
        return
    key = seed if len(seed) == _KEY_BYTES else base64.urlsafe_b64decode(seed)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()  # a seed is used for one mask
    zeros, block = memoryview(bytes(4 * _BLOCK)), np.empty(_BLOCK, "<u4")
    for start in range(0, len(total), _BLOCK):
        part = total[start : start + _BLOCK]
        stream.update_into(zeros[: 4 * len(part)], block.data.cast("B"))
        operation(part, block[: len(part)], out=part)


def quantize(
    delta: np.ndarray, generator: np.random.Generator, *, clipping_range: float, target_range: int, weight: float = 1.0
) -> np.ndarray:
    """Clip a vector, multiply it by a weight of at most 1, and round it to steps from 0 to ``target_range``, as uint32.

    A value is rounded down with the probability that makes the weighted vector the mean over the generator's draws.
    Flower multiplies before it clips, so that a client with a small weight could exceed the range.
    """
    quantized = np.empty(len(delta), np.uint32)
    for start in range(0, len(delta), _BLOCK):
        steps = np.clip(delta[start : start + _BLOCK], -clipping_range, clipping_range)
        steps *= weight
        steps += clipping_range
        steps *= target_range / (2 * clipping_range)
        rounded = np.ceil(steps)
        rounded -= generator.random(len(steps)) < rounded - steps
        quantized[start : start + _BLOCK] = rounded
    return quantized


def rounding_generator(delta: np.ndarray) -> np.random.Generator:
    """Return a generator that depends on the vector alone, so that equal runs have equal sums."""
    return np.random.default_rng(xxh3_128_intdigest(np.ascontiguousarray(delta).data))


def dequantized_mean(
    total: np.ndarray, *, clients: int, total_weight: int, clipping_range: float, target_range: int
) -> np.ndarray:
    """Return the mean of the vectors whose quantized sum over ``clients`` is ``total``, as Flower computes it.

    ``total_weight`` is the sum of the weights in steps, ``target_range`` for a weight of 1.
    """
    mean = total.astype(np.float64) * ((2 * clipping_range) / target_range) - clipping_range
    mean += -(clients - 1) * clipping_range
    mean *= target_range / total_weight
    return mean
