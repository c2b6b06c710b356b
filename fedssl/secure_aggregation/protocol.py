"""Constants and helpers of secure aggregation that server and clients share (Flower's SecAgg+ protocol).

A round has four phases, each a message to every client and its reply, with a record `SECAGG_CONFIG_KEY`:

==========================  ==============================================  ===================================
phase (``stage``)           message                                         reply
==========================  ==============================================  ===================================
``setup``                   graph, quantization, mask generator             two public keys, mask generator
``share_keys``              public keys of the neighbors                    encrypted shares for each neighbor
``collect_masked_vectors``  encrypted shares from each neighbor, the plan   masked update
``unmask``                  neighbors that survived, and that dropped out   a share of the seed or of the mask key
==========================  ==============================================  ===================================
"""

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey

from fedssl.arrays import VARIANCE, Layers
from fedssl.secure_aggregation.flower_internals import bytes_to_private_key, bytes_to_public_key, public_key_to_bytes

SECAGG_CONFIG_KEY = "secaggplus_configs"  # Flower's name of the record with the stages of the protocol
SETUP, SHARE_KEYS, COLLECT, UNMASK = PHASES = ("setup", "share_keys", "collect_masked_vectors", "unmask")
MASK_GENERATOR = "mask_generator"  # not a key of Flower: its clients do not reply it and use ``mt19937``
MIN_CLIENTS = 3  # of two clients, each computes the other's update from the sum
TARGET_RANGE = 1 << 22
# How updates become integers under masks. With other values, masks may not cover all of a number.
SECAGG_PARAMETERS = {"target_range": TARGET_RANGE, "mod_range": 1 << 32}
UNIFORM_WEIGHT = 1  # max_weight of a round in which all clients have this weight; larger ones are numbers of images
MAX_WEIGHT = TARGET_RANGE  # the weight of one image is a step at least
MAX_CLIENTS = (1 << 32) // TARGET_RANGE - 1  # more quantized values may exceed the modulus
SEED_BYTES = 32  # of the seed of a client's own mask
KEY_BYTES = 306  # of a client's private mask key in PEM


def read_public_key(data: object) -> bytes:
    """Return a public key in Flower's form; `ValueError` if it is no key with which its neighbors can agree."""
    if not isinstance(data, bytes):
        raise ValueError("it is no public key")
    try:
        key = bytes_to_public_key(data)
    except UnsupportedAlgorithm as error:
        raise ValueError("its algorithm is unknown") from error
    is_of_curve = isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP384R1)
    if not is_of_curve or public_key_to_bytes(key) != data:  # a key has no other form
        raise ValueError("it is no public key of the curve secp384r1")
    return data


def check_secret(secret: bytes, *, public: bytes | None) -> None:
    """Raise `ValueError` if a secret is not the private key of a public one, or no seed if that is None."""
    try:
        is_valid = len(secret) == SEED_BYTES
        if public is not None:
            is_valid = public_key_to_bytes(bytes_to_private_key(secret).public_key()) == public
    except (TypeError, UnsupportedAlgorithm):  # of keys that Flower does not create
        is_valid = False
    if not is_valid:
        raise ValueError("the shares reveal another secret")


def summed_names(layers: Layers) -> list[str]:
    """Return the names of the layers that are summed, in order: all but integer counters."""
    return [name for name, array in layers.items() if array.dtype.kind == "f"]


def summed_size(layers: Layers) -> int:
    """Return the length of `delta_of`."""
    return sum(layers[name].size for name in summed_names(layers))


def delta_of(layers: Layers, start: Layers) -> np.ndarray:
    """Return the change of all summed layers as one float64 vector."""
    deltas = [layers[name].astype(np.float64) - start[name] for name in summed_names(start)]
    return np.concatenate([delta.reshape(-1) for delta in deltas])


def apply_delta(layers: Layers, delta: np.ndarray) -> Layers:
    """Add a `delta_of` to the layers, without counters. Variances below 0, from rounding to steps, become 0."""
    applied, start = dict(layers), 0
    for name in summed_names(layers):
        array = layers[name]
        part = delta[start : start + array.size].reshape(array.shape)
        changed = (array + part).astype(array.dtype)
        applied[name], start = np.maximum(changed, 0) if name.endswith(VARIANCE) else changed, start + array.size
    return applied
