"""Limits of a device; tests/client_app/test_limit_checks.py compares messages and settings with them."""

import time

import pytest

from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.limits import Limits, read_limits


def test_the_time_of_a_round_is_in_minutes(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    check = Limits(minutes=2).make_deadline_check()
    monkeypatch.setattr(time, "monotonic", lambda: 1119.0)
    check()
    monkeypatch.setattr(time, "monotonic", lambda: 1121.0)
    with pytest.raises(RequestRefused, match="longer than the 2 minutes of a round"):
        check()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epoch: 3", "the limits have epoch; known are memory, epochs, batch, size, threads, minutes"),
        ("epochs: many", "has epochs: many; give a whole number above 0"),
        ("epochs: 1.5", "has epochs: 1.5; give a whole number above 0"),
        ("memory: .inf", "has memory: inf; give a number above 0"),
        ("memory: true", "has memory: True; give a number above 0"),
        ("- epochs", "it contains a list instead of a dict"),
    ],
)
def test_limits_that_are_none(text, sentence, tmp_path):
    (tmp_path / "limits.yaml").write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_limits(tmp_path / "limits.yaml")


@pytest.mark.parametrize("text", ["", "# epochs: 3\n"])
def test_a_file_of_comments_sets_no_limit(text, tmp_path):
    (tmp_path / "limits.yaml").write_text(text)
    assert read_limits(tmp_path / "limits.yaml") == Limits()
