"""Hours, rounds per day and power: a round that may not start is refused with the limit that forbids it."""

import datetime

import pytest

from client_app.availability import ROUNDS_FILE, check_hours, check_power, count_round, parse_hours
from client_app.limits import Limits, read_limits
from fedssl.errors import InputError, RequestRefused


def at(hour, minute=0, *, day=25):
    return datetime.datetime(2026, 11, day, hour, minute, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("09:00-17:00", [at(9), at(16, 59)], [at(8, 59), at(17), at(0)]),
        ("22:00-06:00", [at(22), at(0), at(5, 59)], [at(6), at(21, 59)]),
        ("00:00-00:00", [at(0), at(12)], []),
    ],
)
def test_active_hours_may_contain_midnight(hours, inside, outside):
    for now in inside:
        check_hours(parse_hours(hours), now)
    for now in outside:
        with pytest.raises(RequestRefused, match=r"trains from \d\d:\d\d to \d\d:\d\d only \(active_hours\)"):
            check_hours(parse_hours(hours), now)


def test_rounds_are_counted_over_24_hours(tmp_path):
    folder = tmp_path / "states"
    for hour in (1, 5):
        count_round(folder, maximum=2, now=at(hour))
    with pytest.raises(RequestRefused, match="2 rounds per day at most"):
        count_round(folder, maximum=2, now=at(23))
    count_round(folder, maximum=2, now=at(1, 1, day=26))  # the first round is a day ago
    with pytest.raises(RequestRefused):
        count_round(folder, maximum=2, now=at(4, 59, day=26))
    (folder / ROUNDS_FILE).write_text("damaged")
    count_round(folder, maximum=1, now=at(5, day=26))


@pytest.mark.parametrize(
    ("supplies", "allowed"),
    [
        ({}, True),  # no battery
        ({"AC": "1", "BAT0": None}, True),
        ({"AC": "0", "BAT0": None}, False),
        ({"AC": "0", "usb": "1"}, True),
    ],
)
def test_power(tmp_path, supplies, allowed):
    for name, online in supplies.items():
        (tmp_path / name).mkdir()
        if online is not None:
            (tmp_path / name / "online").write_text(f"{online}\n")
    if allowed:
        check_power(tmp_path)
    else:
        with pytest.raises(RequestRefused, match="runs on battery"):
            check_power(tmp_path)


def test_limits_are_read_and_checked(tmp_path):
    file = tmp_path / "limits.yaml"
    file.write_text("active_hours: 22:00-06:00\nmax_rounds_per_day: 1\nonly_on_power: false\n")
    limits = read_limits(file)
    assert limits == Limits(active_hours="22:00-06:00", max_rounds_per_day=1)
    always = Limits(max_rounds_per_day=1)
    always.check_start(tmp_path)
    with pytest.raises(RequestRefused, match="1 rounds per day"):
        always.check_start(tmp_path)
    Limits().check_start(tmp_path)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("active_hours: 22-6", "give a start and an end, such as 22:00-06:00"),
        ("active_hours: 25:00-06:00", "give a start and an end"),
        ("max_rounds_per_day: 0", "give a whole number above 0"),
        ("only_on_power: 1", "give true or false"),
    ],
)
def test_invalid_limits(tmp_path, line, sentence):
    (tmp_path / "limits.yaml").write_text(line)
    with pytest.raises(InputError, match=sentence):
        read_limits(tmp_path / "limits.yaml")
