"""Hours, rounds per day and power: a round that may not start is refused with the limit that forbids it."""

import datetime
import json

import pytest

from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.availability import USAGE_FILE, Usage, add_usage, check_hours, check_power, parse_hours, read_usage
from fedssl.fleet.limits import Limits, read_limits


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


def test_the_usage_of_24_hours_is_counted(tmp_path):
    folder = tmp_path / "states"
    assert read_usage(folder, at(0)) == Usage()
    add_usage(folder, at(1), rounds=1)
    add_usage(folder, at(2), num_bytes=300)
    add_usage(folder, at(5), rounds=1)
    add_usage(folder, at(6), num_bytes=50)
    assert read_usage(folder, at(23)) == Usage(rounds=2, bytes=350, largest_message=300)
    assert read_usage(folder, at(1, 1, day=26)) == Usage(rounds=1, bytes=350, largest_message=300)
    assert read_usage(folder, at(5, 30, day=26)) == Usage(rounds=0, bytes=50, largest_message=50)
    assert read_usage(folder, at(0, day=23)) == Usage()  # the clock was wrong before
    add_usage(folder, at(6, day=26), rounds=1)  # removes older entries
    assert len(json.loads((folder / USAGE_FILE).read_text())) == 1
    (folder / USAGE_FILE).write_text("damaged")
    assert read_usage(folder, at(6, day=26)) == Usage()


def test_budgets(tmp_path):
    limits = Limits(max_rounds_per_day=2, max_megabytes_per_day=2)
    limits.check_start(tmp_path)
    limits.check_start(tmp_path)
    with pytest.raises(RequestRefused, match="2 rounds per day at most"):
        limits.check_start(tmp_path)
    limits.count_message(tmp_path, 1_500_000)
    sentence = r"2 MB per day at most \(max_megabytes_per_day\); it sent 1.5 MB, and the update has 0.6 MB"
    with pytest.raises(RequestRefused, match=sentence):
        limits.count_message(tmp_path, 600_000)
    limits.count_message(tmp_path, 500_000)


def test_no_round_starts_whose_update_could_not_be_sent(tmp_path):
    limits = Limits(max_megabytes_per_day=1)
    limits.check_start(tmp_path)  # the size of an update is unknown
    limits.count_message(tmp_path, 600_000)
    limits.count_message(tmp_path, 1_000)  # a later stage of secure aggregation
    with pytest.raises(RequestRefused, match="max_megabytes_per_day"):
        limits.check_start(tmp_path)
    limits.count_message(tmp_path, 399_000)
    with pytest.raises(RequestRefused):
        limits.count_message(tmp_path, 1)


MAINS = {"type": "Mains", "online": "1"}
UNPLUGGED = {"type": "Mains", "online": "0"}
BATTERY = {"type": "Battery", "status": "Discharging", "scope": "System", "present": "1"}
FULL = BATTERY | {"status": "Full"}
UNKNOWN = {"type": "Battery", "status": "Unknown"}
USB = {"type": "USB", "online": "1", "scope": "System"}
MOUSE = {"type": "Battery", "status": "Discharging", "online": "1", "scope": "Device"}
CHARGER_OF_A_PEN = {"type": "Mains", "online": "1", "scope": "Device"}


@pytest.mark.parametrize(
    "supplies",
    [
        [],  # a desktop, or a container
        [MAINS, FULL],
        [MAINS, BATTERY],  # a charger that is weaker than the computer
        [MAINS, BATTERY | {"status": "Charging"}],
        [{"type": "Wireless", "online": "1"}, BATTERY],
        [UNPLUGGED, USB | {"online": "2"}, FULL],  # a programmable voltage
        [USB, UNKNOWN],
        [USB | {"online": "0"}],  # the USB-C port of a desktop
        [USB | {"online": "0"}, MOUSE],
        [UNPLUGGED, USB | {"online": "0"}, BATTERY | {"status": "Not charging"}],  # power that the kernel does not list
        [UNPLUGGED, USB | {"online": "0"}, BATTERY | {"present": "0"}],  # a board with an empty connector
        [FULL, BATTERY | {"status": "Charging"}],
    ],
)
def test_a_round_starts_on_external_power(tmp_path, supplies):
    check_power(power_supplies(tmp_path, supplies))


@pytest.mark.parametrize(
    ("supplies", "reason"),
    [
        ([UNPLUGGED, BATTERY], "runs on battery"),
        ([UNPLUGGED, BATTERY, MOUSE], "runs on battery"),
        ([BATTERY], "runs on battery"),  # a board without an entry of its charger
        ([UNPLUGGED, FULL, BATTERY], "runs on battery"),
        ([USB, BATTERY], "runs on battery"),  # the port supplies a telephone
        ([BATTERY, CHARGER_OF_A_PEN], "runs on battery"),
        ([UNPLUGGED], "runs on battery"),
        ([{"type": "UPS", "status": "Discharging", "online": "1"}], "runs on battery"),
        ([UNPLUGGED, UNKNOWN], "reports no external power"),
        ([UNKNOWN], "reports no external power"),
        ([UNPLUGGED, {"type": "Battery", "status": None}], "reports no external power"),  # unreadable
    ],
)
def test_no_round_starts_on_battery(tmp_path, supplies, reason):
    with pytest.raises(RequestRefused, match=rf"external power only \(only_on_power\), and {reason}"):
        check_power(power_supplies(tmp_path, supplies))


def power_supplies(folder, supplies):
    """A folder as `/sys/class/power_supply`; None is a file that cannot be read."""
    for number, supply in enumerate(supplies):
        (folder / str(number)).mkdir()
        for name, value in supply.items():
            if value is None:
                (folder / str(number) / name).mkdir()
            else:
                (folder / str(number) / name).write_text(f"{value}\n")
    return folder


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
        ("share_quality: yes please", "give true or false"),
        ("max_megabytes_per_day: -1", "give a number above 0"),
        ("security_bits: 0", "give a number above 0"),
        ("corrupted_fraction: 1", "give a number of at least 0 and below 1"),
        ("dropout_fraction: true", "give a number of at least 0 and below 1"),
    ],
)
def test_invalid_limits(tmp_path, line, sentence):
    (tmp_path / "limits.yaml").write_text(line)
    with pytest.raises(InputError, match=sentence):
        read_limits(tmp_path / "limits.yaml")
