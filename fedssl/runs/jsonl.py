"""Lines of a run folder's JSONL files, checked to be what a run writes: the folder may be damaged, or another's."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fedssl.untrusted import MAX_LINES_BYTES, corrupt_file_error, read_text

Validator = Callable[[Any], bool]

_MAX_ABS = 1e150
MAX_SPECTRUM_SIZE = 10**8  # of images times dimensions of a spectrum: its reference is drawn from as many


def read_jsonl(file: Path, *, required: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl``, ``clients.jsonl`` or ``health.jsonl``; none if there is no such file.

    A last line that has no end was cut short, e.g. by a kill, and counts as not written.

    Parameters
    ----------
    file : Path
    required : collection of str
        Keys that every line must have beside ``round``; others are checked where they are there.

    Raises
    ------
    InputError
        The file cannot be read, or a line in it is not one that a run writes.
    """
    text = read_text(file, max_bytes=MAX_LINES_BYTES) or ""
    return [_line(file, line_number, line, required) for line_number, line in enumerate(text.split("\n")[:-1], start=1)]


def _line(file: Path, line_number: int, text: str, required: Collection[str]) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt_file_error(file, f"line {line_number} is no JSON") from error
    if not isinstance(line, dict):
        raise corrupt_file_error(file, f"line {line_number} is no JSON object")
    _rename_old_keys(line)
    for key in ("round", *required):
        if key not in line:
            raise corrupt_file_error(file, f"line {line_number} has no {key}")
    schema = SCHEMAS[file.stem]
    wrong = next((key for key, value in line.items() if key in schema and not schema[key](value)), None)
    if wrong is not None:
        raise corrupt_file_error(file, f"{wrong} in line {line_number} has a value that no run writes there")
    return line


def _rename_old_keys(line: dict[str, Any]) -> None:
    """Give values the keys that a run writes today, in a line of an older run."""
    spectrum = line.get("spectrum")
    if isinstance(spectrum, dict) and "pictures" in spectrum:
        spectrum["images"] = spectrum.pop("pictures")


def text(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def finite_number(value: Any) -> bool:
    """Whether it is a finite number, and one that arithmetic can go on with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_ABS


def count(minimum: int) -> Validator:
    """Whether something is a whole number, no less than ``minimum``."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**53


def optional(validator: Validator) -> Validator:
    """Whether something is null or of this kind."""
    return lambda value: value is None or validator(value)


def mapping_of(validator: Validator) -> Validator:
    """Whether something is an object with values of this kind only."""
    return lambda value: isinstance(value, dict) and all(map(validator, value.values()))


def _cost(value: Any) -> bool:
    return mapping_of(finite_number)(value) and {"peak_memory", "flops"} <= value.keys()


def _spectrum(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("singular_values"), list)
        and all(map(finite_number, value["singular_values"]))
        and all(count(1)(value.get(key)) for key in ("images", "dim"))
        and value["images"] * value["dim"] <= MAX_SPECTRUM_SIZE
        and text(value.get("split"))
    )


# What the values of keys are that somebody reads, by the name of the file.
SCHEMAS: dict[str, dict[str, Validator]] = {
    "metrics": {
        "round": count(1),
        **dict.fromkeys(("loss", "model_cosine", "layer_cosine", "client_seconds"), optional(finite_number)),
        **dict.fromkeys(("seconds", "bytes_up", "bytes_down"), finite_number),
        "clients": count(1),
        "dropped": mapping_of(text),
        "cost": _cost,
        "evaluation": mapping_of(finite_number),
        "units": mapping_of(text),
    },
    "clients": {
        "round": count(1),
        "client": count(0),
        "model": text,
        "cosine": mapping_of(finite_number),
        **dict.fromkeys(("model_cosine", "layer_cosine"), optional(finite_number)),
    },
    "health": {"round": count(1), "client": optional(count(0)), "model": text, "spectrum": _spectrum},
}
