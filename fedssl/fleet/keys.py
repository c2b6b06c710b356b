"""Keys of devices, in the formats that Flower reads."""

import os
import shlex
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedssl.errors import InputError
from fedssl.safe_io import read_bytes

_MAX_BYTES = 2**16  # of a file


def new_private_key() -> bytes:
    """Return a new private key (P-384) in OpenSSH's format."""
    return generate_private_key(SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def load_private_key(content: bytes) -> EllipticCurvePrivateKey:
    """Return a private key that Flower accepts, in OpenSSH's format; raises `ValueError` with the reason."""
    try:
        key = load_ssh_private_key(content, password=None)
    except TypeError as error:
        raise ValueError("its key has a passphrase, which nobody can enter") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("it has no private key in OpenSSH's format, or a damaged one") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("its key is not an ECDSA key on a NIST curve, which Flower requires")
    return key


def read_private_key(file: Path) -> bytes | None:
    """Return a valid private key of a device, in OpenSSH's format; None without a file; raises `InputError`."""
    try:
        content = read_bytes(file, max_bytes=_MAX_BYTES)
        load_private_key(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}); repeat the command as its owner, or choose another folder="
        ) from error
    except ValueError as error:
        raise InputError(f"{file} cannot be used ({error}); {replace_key(file)}") from error
    return content


def replace_key(file: Path) -> str:
    """Return how a device gets another key."""
    return (
        f"run mv {shlex.quote(str(file))} {shlex.quote(f'{file}.old')} and repeat the command: the device gets the key "
        "of the kit, or a new one that the operator registers"
    )


def public_key_line(private_key: bytes, name: str) -> bytes:
    """Return the public key of a private one as a line of a ``.pub`` file."""
    public = load_private_key(private_key).public_key()
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()


def read_public_key(file: Path) -> bytes:
    """Return a ``.pub`` file in PEM format; raises `InputError`."""
    try:
        key = load_ssh_public_key(read_bytes(file, max_bytes=_MAX_BYTES))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); give the .pub file of the device") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a public key; give the .pub file of the device") from error
    if not isinstance(key, EllipticCurvePublicKey):
        raise InputError(f"{file} is not a key on a NIST curve; create it with fedssl-device setup or deploy/keys.py")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def readable_by_others(file: Path) -> str:
    """Return a warning if other users can read a private key; empty if they cannot."""
    if not file.exists() or not stat.S_IMODE(file.stat().st_mode) & 0o077:
        return ""
    return f"warning: other users can read {file}, which has the private key; run chmod 600 {shlex.quote(str(file))}"


def write_private(file: Path, content: bytes) -> None:
    """Create a file that only its owner may read; an existing file is an error."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
