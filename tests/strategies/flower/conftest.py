"""Flower's logger as `caplog` needs it, whatever the tests before have started."""

import logging

import pytest


@pytest.fixture(autouse=True)
def log_reaches_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("flwr")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "disabled", False)
