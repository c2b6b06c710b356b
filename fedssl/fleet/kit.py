"""Startup kits, one file from which a device joins a fleet, and keys of devices in the formats that Flower reads.

A kit is a ZIP archive with ``kit.json`` (name of the device, address of the server, versions of the operator's
packages), ``ca.crt``, and ``node.key`` if the operator created the key. Without it the private key never leaves the
device.
"""

import io
import json
import os
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
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
from fedssl.fleet.address import parse_address
from fedssl.fleet.certificates import check_validity, read_authority, root_certificates
from fedssl.safe_io import open_regular_file, read_bytes
from fedssl.wire.device import check_device_name, installed_versions

_MAX_BYTES = 2**20  # of a file in a kit
_MAX_KIT_BYTES = 2**22
_MAX_KEY_BYTES = 2**16  # of a file


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
        content = read_bytes(file, max_bytes=_MAX_KEY_BYTES)
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


def public_key(private_key: bytes) -> bytes:
    """Return the public key of a private one in PEM format."""
    return load_private_key(private_key).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_public_key(file: Path) -> bytes:
    """Return a ``.pub`` file in PEM format; raises `InputError`."""
    try:
        key = load_ssh_public_key(read_bytes(file, max_bytes=_MAX_KEY_BYTES))
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


@dataclass(frozen=True, kw_only=True)
class Kit:
    """Content of a startup kit; raises `ValueError` if it is invalid."""

    name: str
    server: str  # HOST:PORT at which devices reach the server
    versions: Mapping[str, str]  # of the operator's packages
    certificate: bytes  # of the authority, PEM
    private_key: bytes | None = None  # None: the device creates it

    def __post_init__(self) -> None:
        check_device_name(self.name)
        parse_address(self.server)
        if self.private_key is not None:
            load_private_key(self.private_key)


def make_kit(name: str, server: str, *, certificate: Path, private_key: bytes | None = None) -> Kit:
    """Return the kit of a new device; raises `InputError`."""
    content = read_authority("--certificates", certificate)
    check_validity("--certificates", certificate, content)
    return Kit(name=name, server=server, versions=installed_versions(), certificate=content, private_key=private_key)


def write_kit(kit: Kit, file: Path) -> None:
    """Write a kit to a new file, which only its owner may read; raises `InputError`."""
    fields = {"name": kit.name, "server": kit.server, "versions": dict(kit.versions)}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("kit.json", json.dumps(fields, indent=2) + "\n")
        archive.writestr("ca.crt", kit.certificate)
        if kit.private_key is not None:
            archive.writestr("node.key", kit.private_key)
    try:
        write_private(file, content.getvalue())
    except OSError as error:
        raise InputError(f"{file} cannot be created ({error.strerror}); choose another --output") from error


def read_kit(file: Path) -> Kit:
    """Read a kit; raises `InputError` if it is damaged or no kit."""
    try:
        with open_regular_file(file, max_bytes=_MAX_KIT_BYTES) as stream, zipfile.ZipFile(stream) as archive:
            contents = {name: _read(archive, name) for name in ("kit.json", "ca.crt")}
            key = _read(archive, "node.key") if "node.key" in archive.namelist() else None
        fields = json.loads(contents["kit.json"])
        return Kit(
            name=str(fields["name"]),
            server=str(fields["server"]),
            versions={str(package): str(version) for package, version in dict(fields["versions"]).items()},
            certificate=root_certificates(contents["ca.crt"]),
            private_key=key,
        )
    except OSError as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise InputError(f"{file} {problem}; name a kit of fedssl-fleet invite that you can read") from error
    except Exception as error:  # a foreign file can fail in any way
        reason = str(error) if type(error) in (ValueError, InputError, zipfile.BadZipFile) else type(error).__name__
        raise InputError(f"{file} is not a startup kit ({reason}); ask the operator for another one") from error


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of an archive, whose size may be false."""
    if name not in archive.namelist():
        raise ValueError(f"it has no {name}")
    with archive.open(name) as member:
        content = member.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"its {name} is too large")
    return content
