"""When a device trains: hours of the day, external power, and budgets of rounds and bytes per day."""

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.atomic_files import write_text
from fedssl.errors import RequestRefused
from fedssl.safe_io import read_text

USAGE_FILE = ".usage.json"  # in the folder of states: rounds and messages of the last day
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
    """Refuse a round on battery; raises `RequestRefused`. A computer without power supplies in sysfs has power.

    A discharging battery outweighs a USB port that is online, which may supply another device. See Linux,
    ABI/testing/sysfs-class-power.
    """
    attributes = ("type", "scope", "status", "online", "present")
    found = [{name: _read_attribute(folder / name) for name in attributes} for folder in sorted(supplies.glob("*"))]
    found = [supply for supply in found if supply["scope"] != "Device"]  # which supplies a mouse or another device
    batteries = [supply for supply in found if supply["type"] in ("Battery", "UPS")]
    usb = [supply for supply in found if supply["type"].startswith("USB")]
    others = [supply for supply in found if supply not in batteries and supply not in usb]
    inserted = [battery for battery in batteries if battery["present"] != "0"]
    discharging = any(battery["status"] == "Discharging" for battery in inserted)
    online = usb * (not discharging) + others
    if any(supply["online"] not in ("", "0") for supply in online):  # 1 or 2: fixed or programmable voltage
        return
    is_idle = all(battery["status"] in ("Charging", "Not charging", "Full") for battery in inserted)
    if is_idle if batteries else not others:
        return
    reason = "runs on battery" if discharging or not batteries else "reports no external power"
    raise RequestRefused(f"this device trains on external power only (only_on_power), and {reason}")


def _read_attribute(file: Path) -> str:
    """Return an attribute of sysfs; empty if it is missing or the driver cannot read it."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Usage:
    """Usage of a device within 24 hours."""

    rounds: int = 0
    bytes: int = 0  # of messages that left the device
    largest_message: int = 0  # bytes


def read_usage(states: Path, now: datetime.datetime) -> Usage:
    """Return the usage of the 24 hours before ``now``. A damaged file counts as none."""
    entries = _entries(states, now)
    sent = [entry["bytes"] for entry in entries if entry["bytes"]]
    return Usage(sum(entry["rounds"] for entry in entries), sum(sent), max(sent, default=0))


def add_usage(states: Path, now: datetime.datetime, *, rounds: int = 0, num_bytes: int = 0) -> None:
    """Add a round or a message to the usage."""
    entries = [*_entries(states, now), {"time": now.isoformat(), "rounds": rounds, "bytes": num_bytes}]
    states.mkdir(parents=True, exist_ok=True)
    write_text(states / USAGE_FILE, json.dumps(entries) + "\n")


def _entries(states: Path, now: datetime.datetime) -> list[dict[str, Any]]:
    try:
        entries = json.loads(read_text(states / USAGE_FILE) or "[]")
        return [
            {"time": entry["time"], "rounds": int(entry["rounds"]), "bytes": int(entry["bytes"])}
            for entry in entries
            if abs(now - datetime.datetime.fromisoformat(entry["time"])) < _DAY  # the clock may have been wrong
        ]
    except (ValueError, TypeError, KeyError):  # damaged: the day starts again
        return []
