"""Keys of devices, in the formats that Flower reads."""

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedssl.errors import InputError


def new_private_key() -> bytes:
    """Return a new private key (P-384) in OpenSSH's format."""
    return generate_private_key(SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def public_key_line(private_key: bytes, name: str) -> bytes:
    """Return the public key of a private one as a line of a ``.pub`` file."""
    public = load_ssh_private_key(private_key, password=None).public_key()
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()


def read_public_key(file: Path) -> bytes:
    """Return a ``.pub`` file in PEM format; raises `InputError`."""
    try:
        key = load_ssh_public_key(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); give the .pub file of the device") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a public key; give the .pub file of the device") from error
    if not isinstance(key, EllipticCurvePublicKey):
        raise InputError(f"{file} is not a key on a NIST curve; create it with fedssl-device setup or deploy/keys.py")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def write_private(file: Path, content: bytes) -> None:
    """Create a file that only its owner may read; an existing file is an error."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
