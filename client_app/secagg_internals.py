"""Undocumented names of Flower 1.41: keys and encryption of SecAgg+ on a client."""

from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes

__all__ = [
    "decrypt",
    "encrypt",
    "generate_key_pairs",
    "ndarray_to_bytes",
    "private_key_to_bytes",
    "share_keys_plaintext_concat",
    "share_keys_plaintext_separate",
]
