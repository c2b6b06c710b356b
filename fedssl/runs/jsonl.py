"""Lines of a run folder's JSONL files, checked to be what a run writes: the folder may be damaged, or another's."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fedssl.untrusted import MAX_LINES_BYTES, corrupt_file_error, read_text

Kind = Callable[[Any], bool]

_LARGEST = 1e150
MOST_NUMBERS = 10**8  # of pictures times dimensions of a spectrum: its reference is drawn from as many


def read_lines(file: Path, *, needs: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl``, ``clients.jsonl`` or ``health.jsonl``; none if there is no such file.

    A last line that has no end was cut short, e.g. by a kill, and counts as not written.

    Parameters
    ----------
    file : Path
    needs : collection of str
        Keys that every line must have beside ``round``; others are checked where they are there.

    Raises
    ------
    InputError
        The file cannot be read, or a line in it is not one that a run writes.
    """
    text = read_text(file, max_bytes=MAX_LINES_BYTES) or ""
    return [_line(file, number, line, needs) for number, line in enumerate(text.split("\n")[:-1], start=1)]


def _line(file: Path, number: int, text: str, needs: Collection[str]) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt_file_error(file, f"line {number} is no JSON") from error
    if not isinstance(line, dict):
        raise corrupt_file_error(file, f"line {number} is no JSON object")
    for key in ("round", *needs):
        if key not in line:
            raise corrupt_file_error(file, f"line {number} has no {key}")
    kinds = KINDS[file.stem]
    wrong = next((key for key, value in line.items() if key in kinds and not kinds[key](value)), None)
    if wrong is not None:
        raise corrupt_file_error(file, f"{wrong} in line {number} has a value that no run writes there")
    return line


def word(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def number(value: Any) -> bool:
    """Whether it is a finite number, and one that arithmetic can go on with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def whole(least: int) -> Kind:
    """Whether something is a whole number, no less than ``least``."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53


def maybe(kind: Kind) -> Kind:
    """Whether something is null or of this kind."""
    return lambda value: value is None or kind(value)


def each(kind: Kind) -> Kind:
    """Whether something is an object with values of this kind only."""
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


def _cost(value: Any) -> bool:
    return each(number)(value) and {"peak_memory", "flops"} <= value.keys()


def _spectrum(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("singular_values"), list)
        and all(map(number, value["singular_values"]))
        and all(whole(1)(value.get(key)) for key in ("pictures", "dim"))
        and value["pictures"] * value["dim"] <= MOST_NUMBERS
        and word(value.get("split"))
    )


# What the values of keys are that somebody reads, by the name of the file.
KINDS: dict[str, dict[str, Kind]] = {
    "metrics": {
        "round": whole(1),
        **dict.fromkeys(("loss", "model_cosine", "layer_cosine", "client_seconds"), maybe(number)),
        **dict.fromkeys(("seconds", "bytes_up", "bytes_down"), number),
        "clients": whole(1),
        "dropped": each(word),
        "cost": _cost,
        "evaluation": each(number),
        "units": each(word),
    },
    "clients": {
        "round": whole(1),
        "client": whole(0),
        "model": word,
        "cosine": each(number),
        **dict.fromkeys(("model_cosine", "layer_cosine"), maybe(number)),
    },
    "health": {"round": whole(1), "client": maybe(whole(0)), "model": word, "spectrum": _spectrum},
}
