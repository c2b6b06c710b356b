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
from fedssl.fleet.keys import write_private
from fedssl.wire.device import check_device_name, installed_versions

_MAX_BYTES = 2**20  # of a file in a kit


@dataclass(frozen=True, kw_only=True)
class Kit:
    """Content of a startup kit."""

    name: str
    server: str  # HOST:PORT at which devices reach the server
    versions: Mapping[str, str]  # of the operator's packages
    certificate: bytes  # of the authority, PEM
    private_key: bytes | None = None  # None: the device creates it

    def __post_init__(self) -> None:
        check_device_name(self.name)
        check_server(self.server)


def make_kit(name: str, server: str, *, certificate: Path, private_key: bytes | None = None) -> Kit:
    """Return the kit of a new device; raises `InputError`."""
    try:
        content = certificate.read_bytes()
    except OSError as error:
        raise InputError(f"{certificate} cannot be read ({error.strerror}); name the file ca.crt") from error
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
        with zipfile.ZipFile(file) as archive:
            if any(entry.file_size > _MAX_BYTES for entry in archive.infolist()):
                raise ValueError("a file in it is too large")
            contents = {name: archive.read(name) for name in archive.namelist()}
        fields = json.loads(contents["kit.json"])
        versions = {str(package): str(version) for package, version in dict(fields["versions"]).items()}
        return Kit(
            name=str(fields["name"]),
            server=str(fields["server"]),
            versions=versions,
            certificate=contents["ca.crt"],
            private_key=contents.get("node.key"),
        )
    except FileNotFoundError as error:
        raise InputError(f"{file} does not exist; name the kit that fedssl-fleet invite created") from error
    except InputError:
        raise
    except Exception as error:  # a foreign file can fail in any way
        raise InputError(
            f"{file} is not a startup kit ({type(error).__name__}); ask the operator for another one"
        ) from error


def check_server(server: str) -> tuple[str, int]:
    """Return host and port of an address; raises `InputError`."""
    host, _, port = server.rpartition(":")
    if not (host and port.isdigit()):
        raise InputError(f"--server={server} is not an address; give HOST:PORT, e.g. fed.example.org:443")
    return host.strip("[]"), int(port)
