"""Fixtures of tests that read data sets."""

import logging
import socket

import pytest

from fedssl.datasets import base, listing


@pytest.fixture
def no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    base._read_split.cache_clear()


@pytest.fixture
def log_again(caplog: pytest.LogCaptureFixture) -> None:
    """Log lines again that this process has logged."""
    listing.log_once.cache_clear()
    caplog.set_level(logging.INFO)
