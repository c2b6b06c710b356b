"""Shamir's secret sharing over GF(2^128), with the field and the format of Flower 1.41 (and PyCryptodome).

A padded secret has chunks of 16 bytes. The integer of all chunks side by side has slots of 160 bits, so that one shift
and XOR of integers is an operation on all chunks: the field's polynomials are multiplied by a share's index, which has
few bits, without carries into the next slot.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import xor

from cryptography.hazmat.primitives.padding import PKCS7

_CHUNK, _SLOT = 16, 20  # bytes
_FIELD_BITS = 8 * _CHUNK
_INDEX_BYTES = 4
_MAX_INDEX = 2**16 - 1  # an index has fewer bits than a slot has beyond a chunk
_ONE = 1
_MODULUS = 1 << _FIELD_BITS | 0b10000111  # x^128 + x^7 + x^2 + x + 1


def create_shares(secret: bytes, threshold: int, num: int) -> list[bytes]:
    """Return ``num`` shares of a secret. Any ``threshold`` of them reveal it, and fewer reveal nothing."""
    padder = PKCS7(_FIELD_BITS).padder()
    chunks = padder.update(secret) + padder.finalize()
    coefficients = [secrets.token_bytes(len(chunks)) for _ in range(threshold - 1)]
    return evaluate(chunks, coefficients, num)


def evaluate(chunks: bytes, coefficients: Sequence[bytes], num: int) -> list[bytes]:
    """Return the values of polynomials at 1 to ``num`` as shares. ``coefficients`` start with the highest degree."""
    slots, packed = len(chunks) // _CHUNK, [*map(_pack, coefficients), _pack(chunks)]
    shares = []
    for index in range(1, num + 1):
        value = reduce(lambda value, coefficient: _times(value, index, slots) ^ coefficient, packed)
        shares.append(index.to_bytes(_INDEX_BYTES, "little") + _unpack(value, slots))
    return shares


def combine_shares(shares: Sequence[bytes]) -> bytes:
    """Return the secret of shares, at least as many as its threshold; raises `ValueError` if they do not fit."""
    indices = tuple(int.from_bytes(share[:_INDEX_BYTES], "little") for share in shares)
    length = len(shares[0]) - _INDEX_BYTES
    if length <= 0 or length % _CHUNK or any(len(share) != length + _INDEX_BYTES for share in shares):
        raise ValueError("shares of a secret have the same length")
    if len(set(indices)) < len(indices) or not all(1 <= index <= _MAX_INDEX for index in indices):
        raise ValueError("shares of a secret have different indices")
    slots = length // _CHUNK
    values, weights = [_pack(share[_INDEX_BYTES:]) for share in shares], _weights_at_zero(indices)
    secret = 0
    for bit in reversed(range(_FIELD_BITS)):  # sum of weight * value by Horner's scheme over the bits of the weights
        secret = _times(secret, 2, slots)
        for weight, value in zip(weights, values, strict=True):
            if weight >> bit & 1:
                secret ^= value
    unpadder = PKCS7(_FIELD_BITS).unpadder()
    try:
        return unpadder.update(_unpack(secret, slots)) + unpadder.finalize()
    except ValueError as error:
        raise ValueError("the shares do not reveal a secret") from error


@lru_cache(maxsize=256)
def _weights_at_zero(indices: tuple[int, ...]) -> list[int]:
    """Return the weights of Lagrange's interpolation at zero: the products of x_j / (x_j - x_i) over j other than i."""
    denominators = []
    for index in indices:
        others = (other ^ index for other in indices if other != index)
        denominators.append(reduce(lambda product, factor: _times(product, factor, 1), others, _times(_ONE, index, 1)))
    numerator = reduce(lambda product, index: _times(product, index, 1), indices, _ONE)
    return [_multiply(numerator, _inverse(denominator)) for denominator in denominators]


def _inverse(element: int) -> int:
    """Return the inverse of a non-zero element by Euclid's algorithm for polynomials."""
    first, second, inverse, other = element, _MODULUS, _ONE, 0
    while first != _ONE:
        if first < second:
            first, second, inverse, other = second, first, other, inverse
        shift = first.bit_length() - second.bit_length()
        first, inverse = first ^ second << shift, inverse ^ other << shift
    return inverse


def _multiply(first: int, second: int) -> int:
    product = 0
    for bit in reversed(range(second.bit_length())):
        product = _times(product, 2, 1)
        if second >> bit & 1:
            product ^= first
    return product


def _times(value: int, factor: int, slots: int) -> int:
    """Return the product of every slot and an element of at most 16 bits."""
    product = 0
    while factor:
        low = factor & -factor
        product ^= value * low  # a shift
        factor ^= low
    high = product & _high_bits(slots)
    overflow = high >> _FIELD_BITS
    return product ^ high ^ overflow ^ overflow << 1 ^ overflow << 2 ^ overflow << 7  # x^128 = x^7 + x^2 + x + 1


@lru_cache(maxsize=64)
def _high_bits(slots: int) -> int:
    """Return a mask of the bits of every slot beyond a chunk."""
    high = (1 << 8 * (_SLOT - _CHUNK)) - 1
    return reduce(xor, (high << 8 * _SLOT * slot + _FIELD_BITS for slot in range(slots)))


def _pack(chunks: bytes) -> int:
    space = bytes(_SLOT - _CHUNK)
    starts = range(0, len(chunks), _CHUNK)
    return int.from_bytes(b"".join(space + chunks[start : start + _CHUNK] for start in starts), "big")


def _unpack(value: int, slots: int) -> bytes:
    data = value.to_bytes(_SLOT * slots, "big")
    return b"".join(data[start + _SLOT - _CHUNK : start + _SLOT] for start in range(0, len(data), _SLOT))
