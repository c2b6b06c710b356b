"""Fixtures of tests that read data sets."""

import socket

import pytest

from fedssl.datasets import base


@pytest.fixture
def no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    base._read_split.cache_clear()
