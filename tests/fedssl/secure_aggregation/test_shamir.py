"""Secret sharing: equal to PyCryptodome's bit for bit, interchangeable with Flower's, and private."""

import os
import random

import pytest
from Crypto.Protocol import SecretSharing
from flwr.common.secure_aggregation.crypto import shamir as flower

from fedssl.secure_aggregation.shamir import combine_shares, create_shares, evaluate


def times(first, second):
    """The product in GF(2^128) of x^128 + x^7 + x^2 + x + 1, one bit after the other."""
    product = 0
    while second:
        product ^= first * (second & 1)
        first = first << 1 ^ (first >> 127) * (1 << 128 | 0b10000111)
        second >>= 1
    return product


@pytest.mark.parametrize(("threshold", "num"), [(2, 3), (5, 9), (21, 41)])
def test_shares_are_the_values_of_the_polynomials(threshold, num):
    draws = random.Random(threshold)
    chunks, coefficients = draws.randbytes(48), [draws.randbytes(48) for _ in range(threshold - 1)]
    for index, share in enumerate(evaluate(chunks, coefficients, num), 1):
        expected = index.to_bytes(4, "little")
        for start in range(0, 48, 16):
            value = 0
            for coefficient in [*coefficients, chunks]:  # Horner's scheme, from the highest degree
                value = times(value, index) ^ int.from_bytes(coefficient[start : start + 16], "big")
            expected += value.to_bytes(16, "big")
        assert share == expected


def test_shares_equal_those_of_pycryptodome_with_the_same_coefficients(monkeypatch):
    draws = random.Random(0)
    secret, coefficients = draws.randbytes(16), [draws.randbytes(16) for _ in range(6)]
    left = iter(coefficients)
    monkeypatch.setattr(SecretSharing, "rng", lambda size: next(left))
    expected = SecretSharing.Shamir.split(7, 12, secret, ssss=False)
    assert [
        (int.from_bytes(share[:4], "little"), share[4:]) for share in evaluate(secret, coefficients, 12)
    ] == expected


@pytest.mark.parametrize("length", [1, 15, 16, 32, 306])
def test_shares_and_flowers_shares_reveal_the_same_secrets(length):
    secret = os.urandom(length)
    own, others = create_shares(secret, 4, 7), flower.create_shares(secret, 4, 7)
    assert not set(own) & set(create_shares(secret, 4, 7))  # the polynomials are random
    for chosen in ([0, 1, 2, 3], [6, 2, 4, 1], list(range(7))):
        assert flower.combine_shares([own[index] for index in chosen]) == secret
        assert combine_shares([others[index] for index in chosen]) == secret
        assert combine_shares([own[index] for index in chosen]) == secret


def test_fewer_shares_than_the_threshold_fit_every_secret():
    """Three values of polynomials of degree 3 with a random secret: for any other secret there are such polynomials."""
    draws = random.Random(1)
    secret, other = draws.randbytes(16), draws.randbytes(16)
    shares = evaluate(secret, [draws.randbytes(16) for _ in range(3)], 4)[:3]
    # The polynomial through (0, other) and the three shares has a value at 4, with which they reveal the other secret.
    points = [(0, int.from_bytes(other, "big"))]
    points += [(int.from_bytes(share[:4], "little"), int.from_bytes(share[4:], "big")) for share in shares]
    value = 0
    for x, y in points:
        for z, _ in points:
            if z != x:
                y = times(times(y, 4 ^ z), power(x ^ z))
        value ^= y
    padded = (4).to_bytes(4, "little") + value.to_bytes(16, "big")
    parts = [(int.from_bytes(share[:4], "little"), share[4:]) for share in [*shares, padded]]
    assert SecretSharing.Shamir.combine(parts, ssss=False) == other


def power(element):
    """The inverse: element ** (2^128 - 2)."""
    result = 1
    for _ in range(127):
        element = times(element, element)
        result = times(result, element)
    return result


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda shares: [shares[0], shares[0], shares[1]], "different indices"),
        (lambda shares: [shares[0], shares[1][:-16], shares[2]], "the same length"),
        (lambda shares: [shares[0][:4]] * 3, "the same length"),
        (lambda shares: [bytes(4) + shares[0][4:], *shares[1:]], "different indices"),
        (lambda shares: shares[:2], "do not reveal a secret"),
    ],
)
def test_shares_that_do_not_fit_are_refused(damage, sentence):
    shares = evaluate(b"0123456789abcdef" + bytes([16] * 16), [bytes(range(32)), bytes(range(32, 64))], 3)
    assert combine_shares(shares) == b"0123456789abcdef"
    with pytest.raises(ValueError, match=sentence):
        combine_shares(damage(shares))
