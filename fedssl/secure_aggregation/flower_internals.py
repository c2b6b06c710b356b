"""Undocumented names of Flower 1.41: keys, encryption and arrays as bytes of its SecAgg+."""

from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

__all__ = [
    "bytes_to_private_key",
    "bytes_to_public_key",
    "decrypt",
    "encrypt",
    "generate_key_pairs",
    "generate_shared_key",
    "ndarray_to_bytes",
    "private_key_to_bytes",
    "public_key_to_bytes",
    "share_keys_plaintext_concat",
    "share_keys_plaintext_separate",
]
