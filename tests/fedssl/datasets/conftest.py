"""Fixtures of tests that read data sets."""

import logging
import socket
import threading

import pytest

from fedssl.datasets import base, cache, tables
from fedssl.datasets.decoding import Decoding
from fedssl.logs import log_once


@pytest.fixture
def no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    base.forget_images()


@pytest.fixture
def log_again(caplog: pytest.LogCaptureFixture) -> None:
    """Log lines again that this process has logged."""
    log_once.cache_clear()
    caplog.set_level(logging.INFO)


@pytest.fixture
def cache_all_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache also what is decoded at once, in small pieces."""
    monkeypatch.setattr(cache, "MIN_SECONDS_TO_CACHE", 0)
    monkeypatch.setattr(tables, "CHUNK", 7)
    base.forget_images()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Sources that are decoded while pixels or an index are made, and not for the batches of encoded images."""
    seen: list[object] = []
    original = Decoding.each

    def noted(source: object) -> object:
        if not threading.current_thread().name.startswith("decode"):
            seen.append(source)
        return source

    monkeypatch.setattr(Decoding, "each", lambda decoding, sources: original(decoding, map(noted, sources)))
    return seen
