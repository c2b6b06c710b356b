"""Proxies of the environment, which Flower's HTTP client (httpx) uses for every connection of SuperNodes and commands.

They are named by ``HTTPS_PROXY``, ``HTTP_PROXY`` and ``ALL_PROXY``; the lower-case name takes precedence. ``NO_PROXY``
excepts names with their subdomains, and single IP addresses, but no ranges.
"""

import os
import shlex
from urllib.request import getproxies

import httpx

from fedssl.errors import InputError
from fedssl.fleet.address import is_loopback

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")  # in upper case, too


def check_proxies() -> None:
    """Raise `InputError` if Flower's client cannot be created with the proxies of the environment."""
    try:
        httpx.Client(verify=False).close()
    except ImportError as error:
        scheme = next(scheme for scheme, value in getproxies().items() if value.lower().startswith("socks"))
        raise InputError(
            f"{_describe(scheme)} needs the package socksio, which is not installed; install it with pip install "
            f"'httpx[socks]', or unset {_variable(scheme)}"
        ) from error
    except (ValueError, httpx.InvalidURL) as error:
        for scheme in ("http", "https", "all"):
            if not _is_proxy(getproxies().get(scheme, "")):
                raise InputError(
                    f"{_describe(scheme)} is not a proxy that Flower can use; set {_variable(scheme)} to "
                    "http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT, with NAME:PASSWORD@ before HOST if "
                    "necessary, in which special characters are percent-encoded, or unset it"
                ) from error
        raise InputError(
            f"{_variable('no')}={getproxies().get('no')} cannot be read by Flower ({error}); list names and single "
            "addresses, IPv6 without brackets, such as 127.0.0.1,::1,example.org"
        ) from error


def _is_proxy(value: str) -> bool:
    try:
        return not value or bool(httpx.Proxy(value if "://" in value else f"http://{value}"))
    except (ValueError, httpx.InvalidURL):
        return False


def proxy_of(url: str) -> str:
    """Return variable and value of the proxy for a URL, without credentials; empty if it is connected directly."""
    target = httpx.URL(url)
    with httpx.Client(verify=False) as client:
        if client._transport_for_url(target) is client._transport:
            return ""
    return _describe(target.scheme if getproxies().get(target.scheme) else "all")


def proxy_problem(url: str, error: object) -> str:
    """Return the proxy for a URL, the error and the remedy; empty if the URL is connected directly."""
    proxy = proxy_of(url)
    if not proxy:
        return ""
    target = httpx.URL(url)
    remedy = f"run {exception_command(target.host)}"
    if is_loopback(target.host):
        remedy += ", also before the SuperLink is started"
    elif "407" in str(error):
        remedy = f"set {proxy.partition('=')[0]} to http://NAME:PASSWORD@HOST:PORT of that proxy"
    else:
        remedy = f"allow the connection there, or {remedy} if the host is reached without a proxy"
    return f"through the proxy {proxy} ({error}); {remedy}"


def exception_command(host: str) -> str:
    """Return the command that excepts a host from proxies."""
    hosts = [*filter(None, [getproxies().get("no")]), host]
    return f"export {_variable('no')}={shlex.quote(','.join(hosts))}"


def _variable(scheme: str) -> str:
    """Return the name of the variable of a scheme that counts."""
    lower = f"{scheme}_proxy"
    return next((name for name in (lower, *os.environ) if name in os.environ and name.lower() == lower), lower.upper())


def _describe(scheme: str) -> str:
    before, separator, after = getproxies()[scheme].rpartition("://")
    return f"{_variable(scheme)}={before}{separator}{after.rpartition('@')[2]}"
