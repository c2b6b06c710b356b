"""Limits of a device; tests/client_app/test_edge_client.py compares plans with them."""

import time

import pytest

from fedssl.errors import RequestRefused
from fedssl.fleet.limits import Limits


def test_the_time_of_a_round_is_in_minutes(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    check = Limits(minutes=2).make_deadline_check()
    monkeypatch.setattr(time, "monotonic", lambda: 1119.0)
    check()
    monkeypatch.setattr(time, "monotonic", lambda: 1121.0)
    with pytest.raises(RequestRefused, match="longer than the 2 minutes of a round"):
        check()
