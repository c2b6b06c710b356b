"""History of a device for its owner: one line per event, in ``history.jsonl`` of the folder of states."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedssl.atomic_files import write_text
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.safe_io import read_text

FILE = "history.jsonl"
MAX_LINES = 1000


def record(states: Path, event: str, **details: Any) -> None:
    """Append an event with the local time; only the last `MAX_LINES` are kept."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    line = json.dumps({"time": now, "event": event, **details})
    lines = _lines(states)[-MAX_LINES + 1 :]
    states.mkdir(parents=True, exist_ok=True)
    write_text(states / FILE, "\n".join([*lines, line]) + "\n")


def _lines(states: Path) -> list[str]:
    try:
        return (read_text(states / FILE) or "").splitlines()
    except InputError as error:  # which must not end training
        log.warning("%s; a new history begins", error)
        return []


def read_history(states: Path) -> list[Mapping[str, Any]]:
    """Return all events, the newest last. Damaged lines are left out."""
    events: list[Mapping[str, Any]] = []
    for line in _lines(states):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("time"), str) and isinstance(event.get("event"), str):
            events.append(event)
    return events
