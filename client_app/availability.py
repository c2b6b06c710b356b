"""When a device trains: hours of the day, rounds per day, and external power. Checked before a round starts."""

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path

from fedssl.atomic_files import write_text
from fedssl.errors import RequestRefused
from fedssl.untrusted import read_text

ROUNDS_FILE = ".rounds.json"  # in the folder of states: times of the rounds of the last day
POWER_SUPPLIES = Path("/sys/class/power_supply")
_DAY = datetime.timedelta(days=1)

Hours = tuple[datetime.time, datetime.time]


def parse_hours(text: str) -> Hours:
    """Return start and end of hours such as ``22:00-06:00``; raises `ValueError`."""
    match = re.fullmatch(r"(\d\d:\d\d)-(\d\d:\d\d)", text)
    if match is None:
        raise ValueError(text)
    start, end = (datetime.time.fromisoformat(time) for time in match.groups())
    return start, end


def check_hours(hours: Hours, now: datetime.datetime) -> None:
    """Refuse a round outside of the hours, which may contain midnight; raises `RequestRefused`."""
    (start, end), time = hours, now.time()
    inside = start <= time < end if start < end else time >= start or time < end
    if not inside:
        raise RequestRefused(f"this device trains from {start:%H:%M} to {end:%H:%M} only (active_hours)")


def check_power(supplies: Path = POWER_SUPPLIES) -> None:
    """Refuse a round on battery; raises `RequestRefused`. A device without battery always has power."""
    states = {supply.name: read_text(supply / "online") for supply in sorted(supplies.glob("*"))}
    online = [state.strip() for state in states.values() if state is not None]
    if online and "1" not in online:
        raise RequestRefused("this device trains on external power only (only_on_power), and runs on battery")


def count_round(states: Path, *, maximum: int, now: datetime.datetime) -> None:
    """Count a round; raises `RequestRefused` after ``maximum`` rounds within 24 hours."""
    times = [time for time in _read_times(states / ROUNDS_FILE) if now - time < _DAY]
    if len(times) >= maximum:
        raise RequestRefused(f"this device trains in {maximum} rounds per day at most (max_rounds_per_day)")
    states.mkdir(parents=True, exist_ok=True)
    write_text(states / ROUNDS_FILE, json.dumps([time.isoformat() for time in (*times, now)]) + "\n")


def _read_times(file: Path) -> Sequence[datetime.datetime]:
    try:
        return [datetime.datetime.fromisoformat(time) for time in json.loads(read_text(file) or "[]")]
    except (ValueError, TypeError):  # damaged: the day starts again
        return []
