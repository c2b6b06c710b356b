"""Addresses of servers, ``HOST:PORT``: of startup kits, of the SuperLink, and of Flower's ``config.toml``."""

import ipaddress
import re

from fedssl.errors import InputError
from fedssl.safe_io import sanitize_line

_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # with _, which names of containers have


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port; raises `ValueError` with the reason. An IPv6 address is returned without its brackets."""
    host, colon, port = text.rpartition(":")
    if "://" in text:
        raise ValueError("it has a scheme")
    if not colon:
        raise ValueError("it has no port")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ValueError("its port is not a number from 1 to 65535")
    _check_host(host)
    return host.strip("[]"), int(port)


def _check_host(host: str) -> None:
    try:
        if host.startswith("[") and host.endswith("]"):
            address = ipaddress.IPv6Address(host[1:-1])
            if address.scope_id is not None:
                raise ValueError("its zone is valid on one machine only")
            unspecified = address.is_unspecified
        elif ":" in host:
            raise ValueError("it has more than one colon; an IPv6 address needs brackets")
        elif host.rpartition(".")[2].isdecimal():
            unspecified = ipaddress.IPv4Address(host).is_unspecified
        else:
            unspecified = False
            if len(host) > 253 or not re.fullmatch(rf"({_LABEL}\.)*{_LABEL}", host):
                raise ValueError("its host is neither a DNS name nor an IP address")
    except ipaddress.AddressValueError as error:
        raise ValueError("its host is not an IP address") from error
    if unspecified:
        raise ValueError("nobody can connect to that host; a server listens there on all of its addresses")


def check_address(name: str, text: str) -> tuple[str, int]:
    """Return host and port as `parse_address` does; raises `InputError`, which calls the address ``name``."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise InputError(
            f"{name}={sanitize_line(text, max_chars=100)} is not an address ({error}); give HOST:PORT, such as "
            "fed.example.org:443 or [2001:db8::1]:443"
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
