"""Signatures of a fleet's server: ECDSA with the key of its TLS certificate, which the fleet's authority signed."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedssl.errors import InputError
from fedssl.safe_io import read_bytes

_ALGORITHM = ECDSA(SHA384())
_MAX_BYTES = 2**16  # of a file


def load_signing_key(file: Path) -> EllipticCurvePrivateKey:
    """Return the private key in a file; raises `InputError`."""
    try:
        key = load_pem_private_key(read_bytes(file, max_bytes=_MAX_BYTES), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"engine.signing_key={file} cannot be read ({error}); set it to the file server.key of deploy/keys.py"
        ) from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(f"engine.signing_key={file} is not an elliptic-curve key; use deploy/keys.py")
    return key


def sign(text: bytes, key: EllipticCurvePrivateKey) -> bytes:
    """Return the signature of a text."""
    return key.sign(text, _ALGORITHM)


def verify(text: bytes, signature: bytes, *, certificate: bytes, authority: bytes) -> None:
    """Raise `ValueError` unless the certificate's key signed the text, and the authority the certificate."""
    if not signature:
        raise ValueError("it is not signed")
    try:
        server = x509.load_pem_x509_certificate(certificate)
        server.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        key = server.public_key()
        if not isinstance(key, EllipticCurvePublicKey):
            raise ValueError("its certificate has another kind of key")
        key.verify(signature, text, _ALGORITHM)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise ValueError("its signature is not from the server of this fleet") from error
    if not server.not_valid_before_utc <= datetime.datetime.now(datetime.UTC) <= server.not_valid_after_utc:
        raise ValueError("the certificate of its signature has expired")
