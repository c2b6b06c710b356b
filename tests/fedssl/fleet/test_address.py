"""Addresses of servers: names and IP addresses with a port; nothing else reaches a kit, a shell or the network."""

import pytest

from fedssl.errors import InputError
from fedssl.fleet.address import check_address, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("fed.example.org:443", "fed.example.org", 443),
        ("FED-1.example.org:1", "FED-1.example.org", 1),
        ("super_link:65535", "super_link", 65535),
        ("localhost:8000", "localhost", 8000),
        ("xn--bcher-kva.example:443", "xn--bcher-kva.example", 443),
        ("203.0.113.7:443", "203.0.113.7", 443),
        ("[2001:db8::1]:443", "2001:db8::1", 443),
    ],
)
def test_addresses(text, host, port):
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no port"),
        ("fed.example.org", "it has no port"),
        ("https://fed.example.org:443", "it has a scheme"),
        ("fed.example.org:443/v1", "its port is not a number"),
        ("fed.example.org:0", "its port is not a number from 1 to 65535"),
        ("fed.example.org:65536", "its port is not a number"),
        ("fed.example.org:-1", "its port is not a number"),
        ("fed.example.org:٤٤٣", "its port is not a number"),
        ("fed.example.org:443\n", "its port is not a number"),
        ("fed.example.org:443\nLD_PRELOAD=/x.so", "its port is not a number"),
        ("fed.example.org:443:443", "more than one colon"),
        ("2001:db8::1:443", "an IPv6 address needs brackets"),
        ("[fed.example.org]:443", "not an IP address"),
        ("[fe80::1%eth0]:443", "its zone"),
        ("256.0.0.1:443", "not an IP address"),
        ("10.0.1:443", "not an IP address"),
        ("0.0.0.0:443", "nobody can connect to that host"),
        ("[::]:443", "nobody can connect to that host"),
        (" fed.example.org:443", "neither a DNS name nor an IP address"),
        ("fed example.org:443", "neither a DNS name"),
        ("fed.example.org\n:443", "neither a DNS name"),
        ("fed.example.org.:443", "neither a DNS name"),  # no certificate is valid for the final dot
        ("bücher.example:443", "neither a DNS name"),
        ("$(reboot):443", "neither a DNS name"),
        ("user@fed.example.org:443", "neither a DNS name"),
        ("-fed.example.org:443", "neither a DNS name"),
        ("*.example.org:443", "neither a DNS name"),
        (f"{'a' * 64}.org:443", "neither a DNS name"),
        (":443", "neither a DNS name"),
    ],
)
def test_other_text_is_refused_with_the_reason(text, reason):
    with pytest.raises(InputError, match=rf"^--server=.* is not an address \(.*({reason}).*\); give HOST:PORT, such"):
        check_address("--server", text)


def test_this_machine():
    assert [host for host in ("127.0.0.1", "127.1.2.3", "::1", "LocalHost") if not is_loopback(host)] == []
    assert [host for host in ("10.0.0.1", "2001:db8::1", "localhost.example.org") if is_loopback(host)] == []
