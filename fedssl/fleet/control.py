"""The Control API of a SuperLink: its connection, and the devices that are registered with it."""

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from fedssl.config.literal import user_path
from fedssl.config.settings import EngineSettings
from fedssl.errors import InputError
from fedssl.fleet import control_internals
from fedssl.fleet.address import check_address, is_loopback
from fedssl.fleet.certificates import read_authority, verification_problem
from fedssl.fleet.proxy import check_proxies, proxy_problem


@contextmanager
def control_api(
    engine: EngineSettings, *, names: tuple[str, str] = ("engine.address", "engine.root_certificates")
) -> Iterator[control_internals.ControlHttpClient]:
    """Yield a client of the Control API; raises `InputError` for an invalid address or certificate, or no connection.

    ``names`` are those of the settings or options that give the address and the certificate.
    """
    address, certificates = str(engine.address), engine.root_certificates
    host, _ = check_address(names[0], address)
    if certificates is None and not is_loopback(host):
        raise InputError(
            f"{names[0]}={address} is another machine, and without TLS anybody in between could run code on all "
            f"devices; set {names[1]}=FILE to the certificate of its authority"
        )
    check_proxies()
    root = None if certificates is None else read_authority(names[1], user_path(certificates))
    control = control_internals.connect(address, root_certificates=root)
    try:
        with _http_errors(f"{names[0]}={address}", names, url=f"{'https' if root else 'http'}://{address}"):
            yield control
    finally:
        control.close()


@contextmanager
def _http_errors(server: str, names: tuple[str, str], *, url: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPStatusError as error:
        reason = control_internals.error_message(error.response.text)
        if reason:
            raise InputError(f"the SuperLink at {server} rejects the request: {reason}") from error
        if error.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
            raise InputError(
                f"the program at {server} has failed (status 500); its log has the reason; if that is `no such table`, "
                "start the SuperLink without --database, or from an environment whose path has no spaces"
            ) from error
        raise InputError(_foreign_answer(server, names[0], url, f"status {error.response.status_code}")) from error
    except httpx.HTTPError as error:
        reason = verification_problem(error)
        if reason:
            raise InputError(
                f"the certificate of {server} is not valid ({reason}); renew it with deploy/keys.py, or set "
                f"{names[1]} to the certificate of its authority"
            ) from error
        proxied = proxy_problem(url, error)
        if proxied:
            raise InputError(f"{server} cannot be reached {proxied}") from error
        raise InputError(
            f"no SuperLink answers at {server} ({error}); start it, or set {names[0]} to its address, and "
            f"{names[1]} if it has TLS"
        ) from error
    except ValueError as error:
        if not control_internals.is_invalid_response(error):
            raise
        raise InputError(_foreign_answer(server, names[0], url, "no message of Flower")) from error


def _foreign_answer(server: str, name: str, url: str, answer: str) -> str:
    """Return the sentence for an answer that is not the SuperLink's; with TLS it is not a proxy's either."""
    proxied = proxy_problem(url, answer) if url.startswith("http:") else ""
    if proxied:
        return f"{server} cannot be reached {proxied}"
    return (
        f"the Control API does not answer at {server} ({answer}); set {name} to its port, not to that of the devices "
        "or of another program"
    )


def registered_devices(control: control_internals.ControlHttpClient) -> list[dict[str, Any]]:
    """Return the rows of all registered devices by name, as in `fedssl-fleet list --json`. Removed ones are left out.

    The name is empty if a device was registered without one, the status registered, online or offline, and the last
    contact None if it has never connected.
    """
    rows = []
    for node in control_internals.list_nodes(control):
        if node.status != "unregistered":
            contact = None
            if node.online_until:  # as many seconds after the last heartbeat as Flower allows
                heartbeat = node.online_until - control_internals.HEARTBEAT_PATIENCE * node.heartbeat_interval
                time = datetime.datetime.fromtimestamp(heartbeat, tz=datetime.UTC)
                contact = time.isoformat(timespec="seconds")
            rows.append({"name": node.name, "node": node.node_id, "status": node.status, "last contact": contact})
    return sorted(rows, key=lambda row: (row["name"], row["node"]))


def registered_names(engine: EngineSettings) -> Mapping[int, str]:
    """Return the names under which the keys of devices were registered, by node id."""
    with control_api(engine) as control:
        return {row["node"]: row["name"] for row in registered_devices(control) if row["name"]}
