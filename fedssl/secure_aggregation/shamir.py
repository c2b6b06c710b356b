"""Shamir's secret sharing over GF(2^128), with the field and the format of Flower 1.41 (and PyCryptodome).

A padded secret has chunks of 16 bytes. The integer of all chunks side by side has slots of 160 bits, so that one shift
and XOR of integers is an operation on all chunks: the field's polynomials are multiplied by a share's index, which has
few bits, without carries into the next slot.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
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


def is_share(data: bytes, *, secret_bytes: int, num: int) -> bool:
    """Return whether data have the form of one of ``num`` shares of a secret of this length."""
    length = _INDEX_BYTES + (secret_bytes // _CHUNK + 1) * _CHUNK  # padding adds 1 to 16 bytes
    return len(data) == length and 1 <= _index(data) <= num


def secret_and_wrong_sender(
    shares: Mapping[int, bytes], threshold: int, *, check: Callable[[bytes], None]
) -> tuple[bytes, int | None]:
    """Return the secret of shares by sender, and the sender of a wrong one; None if all agree.

    ``threshold`` is more than half of the shares that were made, and ``check`` raises `ValueError` for a secret that is
    known to be wrong. Raises `ValueError` if fewer shares than that agree, or if several are wrong.
    """
    problem = None
    for left_out in (None, *shares):
        try:
            secret = _agreed_secret([share for sender, share in shares.items() if sender != left_out], threshold)
            check(secret)
            return secret, left_out
        except ValueError as error:
            problem = problem or error
    raise ValueError(str(problem))


def _agreed_secret(shares: Sequence[bytes], threshold: int) -> bytes:
    """Return the secret of all shares. It takes ``threshold`` of them: those with the lowest indices, or the highest.

    The lowest indices are the same ones for most secrets, and so are their weights.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares do not reveal a secret of {threshold}")
    ordered = sorted(shares, key=_index)
    secret = combine_shares(ordered[:threshold])
    if len(shares) > threshold and combine_shares(ordered[-threshold:]) != secret:
        raise ValueError("the shares do not agree")
    return secret


def _index(share: bytes) -> int:
    return int.from_bytes(share[:_INDEX_BYTES], "little")


def combine_shares(shares: Sequence[bytes]) -> bytes:
    """Return the secret of shares, at least as many as its threshold; raises `ValueError` if they do not fit."""
    indices = tuple(map(_index, shares))
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
