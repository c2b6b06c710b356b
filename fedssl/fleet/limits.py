"""Limits of a device for server requests, set by its owner in the file ``limits`` of the node configuration."""

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.availability import Usage, add_usage, check_hours, check_power, parse_hours, read_usage
from fedssl.machine.memory import available_memory, grown_memory
from fedssl.safe_io import read_yaml

_UNKNOWN_MEMORY = 2.0  # GB, if the system does not report its memory
_SHARE = 0.75  # of the available memory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits; the file may set any of them."""

    # GB, of a message, of the images, and of a training step by estimate; never more than three quarters of what is
    # available at the time, which is the default
    memory: float | None = None
    epochs: int = 100  # local epochs of a round
    batch: int = 1024  # images of a step
    size: int = 512  # height and width of an image, in pixels
    threads: int = 64
    minutes: float = 60.0  # of training, per round
    active_hours: str | None = None  # of local time, in which a round may start, such as 22:00-06:00
    max_rounds_per_day: int | None = None
    max_megabytes_per_day: float | None = None  # of messages that leave the device
    only_on_power: bool = False  # no round on battery (Linux)
    share_quality: bool = False  # label-free quality of delivered encoders on the local images
    security_bits: float = 40  # of secure aggregation at least, for these fractions of the clients of a round:
    corrupted_fraction: float = 0.2  # that may collude with the server
    dropout_fraction: float = 0.2  # that may drop out

    def memory_bytes(self) -> int:
        available = available_memory(reusable=grown_memory())
        if available is None:
            return int((self.memory or _UNKNOWN_MEMORY) * 1e9)
        return int(min(_SHARE * available, math.inf if self.memory is None else self.memory * 1e9))

    def check_start(self, states: Path) -> None:
        """Refuse to start a round now, or count it in the folder of states; raises `RequestRefused`."""
        self.check_now(states)
        add_usage(states, _now(), rounds=1)

    def check_now(self, states: Path) -> None:
        """Refuse to start a round now; raises `RequestRefused`. Expect a message as large as the largest one so far."""
        if self.active_hours is not None:
            check_hours(parse_hours(self.active_hours), _now())
        if self.only_on_power:
            check_power()
        usage, max_rounds = read_usage(states, _now()), self.max_rounds_per_day
        if max_rounds is not None and usage.rounds >= max_rounds:
            raise RequestRefused(f"this device trains in {max_rounds} rounds per day at most (max_rounds_per_day)")
        self._check_bytes(usage, num_bytes=usage.largest_message)

    def count_message(self, states: Path, num_bytes: int) -> None:
        """Refuse to send a message, or count it in the folder of states; raises `RequestRefused`."""
        self._check_bytes(read_usage(states, _now()), num_bytes=num_bytes)
        add_usage(states, _now(), num_bytes=num_bytes)

    def _check_bytes(self, usage: Usage, *, num_bytes: int) -> None:
        limit = self.max_megabytes_per_day
        if limit is not None and usage.bytes + num_bytes > limit * 1e6:
            raise RequestRefused(
                f"this device sends {limit:g} MB per day at most (max_megabytes_per_day); it sent "
                f"{usage.bytes / 1e6:.1f} MB, and the update has {num_bytes / 1e6:.1f} MB"
            )

    def make_deadline_check(self) -> Callable[[], None]:
        """Return a function that raises `RequestRefused` once the time for a round is up."""
        end = time.monotonic() + 60 * self.minutes

        def check() -> None:
            if time.monotonic() > end:
                raise RequestRefused(
                    f"training takes longer than the {self.minutes:g} minutes of a round that this device allows; "
                    "lower local_epochs"
                )

        return check


def read_limits(file: Path) -> Limits:
    """Read the file of limits; raises `InputError`."""
    limits, names = read_yaml(file, dict, empty={}), [field.name for field in fields(Limits)]
    if limits is None:
        raise InputError(f"limits={file} does not exist; name a file with {', '.join(names)}, or leave limits out")
    for key, value in limits.items():
        if key not in names:
            raise InputError(
                f"the limits have {key}; known are {', '.join(names)}; remove it, or upgrade the server if a newer "
                "version wrote it"
            )
        problem = _problem(key, value)
        if problem:
            raise InputError(f"{file} has {key}: {value}; give {problem}")
    return Limits(**limits)


def _problem(key: str, value: Any) -> str:
    """Return what a limit must be; empty if the value is valid."""
    if key in ("only_on_power", "share_quality"):
        return "" if isinstance(value, bool) else "true or false"
    if key == "active_hours":
        try:
            parse_hours(str(value))
        except ValueError:
            return "a start and an end, such as 22:00-06:00"
        return ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in ("corrupted_fraction", "dropout_fraction"):
        return "" if is_number and 0 <= value < 1 else "a number of at least 0 and below 1"
    whole = key in ("epochs", "batch", "size", "threads", "max_rounds_per_day")
    valid = is_number and 0 < value < math.inf and (isinstance(value, int) or not whole)
    return "" if valid else f"a {'whole ' if whole else ''}number above 0"


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()
