"""Startup kits: one file from which a device joins a fleet.

A kit is a ZIP archive with ``kit.json`` (name of the device, address of the server, versions of the operator's
packages), ``ca.crt``, and ``node.key`` if the operator created the key. Without it the private key never leaves the
device.
"""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fedssl.errors import InputError
from fedssl.fleet.address import parse_address
from fedssl.fleet.certificates import check_validity, read_authority, root_certificates
from fedssl.fleet.keys import load_private_key, write_private
from fedssl.safe_io import open_regular_file
from fedssl.wire.device import check_device_name, installed_versions

_MAX_BYTES = 2**20  # of a file in a kit
_MAX_KIT_BYTES = 2**22


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
    fields = {key: value for key, value in asdict(kit).items() if key in ("name", "server", "versions")}
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
