"""The Control API of a SuperLink: its connection, and the devices that are registered with it."""

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from fedssl.config.settings import EngineSettings
from fedssl.errors import InputError
from fedssl.fleet import compat

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, kw_only=True)
class RegisteredDevice:
    """A device whose key is registered. ``name`` is empty if it was registered without one."""

    name: str
    node_id: int
    status: str  # registered, online, offline
    last_contact: datetime.datetime | None  # None: it has never connected


@contextmanager
def control_api(engine: EngineSettings) -> Iterator[compat.ControlHttpClient]:
    """Yield a client of the Control API; raises `InputError` for an invalid address or certificate."""
    address, certificates = str(engine.address), engine.root_certificates
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise InputError(f"engine.address={address} is not the address of a SuperLink; set it to HOST:PORT")
    if certificates is None and host not in LOOPBACK:
        raise InputError(
            f"engine.address={address} is another machine, and without TLS anybody in between could run code on all "
            "devices; set engine.root_certificates=FILE to the certificate of its authority"
        )
    try:
        root = None if certificates is None else Path(certificates).read_bytes()
        control = compat.connect(address, root_certificates=root)
    except (OSError, ValueError) as error:  # of ssl: OSError
        raise InputError(
            f"engine.root_certificates={certificates} cannot be used ({error}); set it to the file ca.crt of "
            "deploy/keys.py"
        ) from error
    try:
        with _http_errors(address):
            yield control
    finally:
        control.close()


@contextmanager
def _http_errors(address: str) -> Iterator[None]:
    """Raise HTTP errors as `InputError`."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        reason = compat.error_message(error.response.text)
        if reason:
            raise InputError(f"the SuperLink at engine.address={address} rejects the request: {reason}") from error
        raise InputError(
            f"the SuperLink at engine.address={address} rejects the request (status {error.response.status_code}); set "
            "engine.address to the port of the Control API, not to that of the devices"
        ) from error
    except httpx.TransportError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            reason = str(error).partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
            raise InputError(
                f"the certificate of engine.address={address} is not valid ({reason}); renew it with deploy/keys.py, "
                "or set engine.root_certificates to the certificate of its authority"
            ) from error
        raise InputError(
            f"no SuperLink answers at engine.address={address} ({error}); start it, or set engine.address to its "
            "address, and engine.root_certificates if it has TLS"
        ) from error


def registered_devices(control: compat.ControlHttpClient) -> list[RegisteredDevice]:
    """Return all registered devices by name. Removed devices are left out."""
    devices = [
        RegisteredDevice(name=node.name, node_id=node.node_id, status=node.status, last_contact=_last_contact(node))
        for node in compat.list_nodes(control)
        if node.status != "unregistered"
    ]
    return sorted(devices, key=lambda device: (device.name, device.node_id))


def registered_names(engine: EngineSettings) -> Mapping[int, str]:
    """Return the names under which the keys of devices were registered, by node id."""
    with control_api(engine) as control:
        return {device.node_id: device.name for device in registered_devices(control) if device.name}


def _last_contact(node: compat.NodeInfo) -> datetime.datetime | None:
    """Return the time of the last heartbeat, which is as many seconds before ``online_until`` as Flower allows."""
    if not node.online_until:
        return None
    heartbeat = node.online_until - compat.HEARTBEAT_PATIENCE * node.heartbeat_interval
    return datetime.datetime.fromtimestamp(heartbeat, tz=datetime.UTC)
