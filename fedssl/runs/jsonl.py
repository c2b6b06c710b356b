"""Read and validate the JSONL files of a run folder, which may be damaged or of another program."""

import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedssl.safe_io import MAX_LINES_BYTES, corrupt_file_error, open_regular_file, read_text

Validator = Callable[[Any], bool]

_MAX_ABS = 1e150
MAX_SPECTRUM_SIZE = 10**8  # images times dimensions; as many random numbers are drawn as reference


def read_jsonl(file: Path, *, required: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl``, ``clients.jsonl`` or ``health.jsonl``; none if the file does not exist.

    ``required`` are the keys of every line besides ``round``; other keys are optional. A last line without a line end,
    e.g. of a killed run, is not read (see `incomplete_files`). Raise an `InputError` if the file cannot be read, a line
    is invalid, or rounds are repeated or out of order.
    """
    text = read_text(file, max_bytes=MAX_LINES_BYTES) or ""
    lines = [_line(file, number, line, required) for number, line in enumerate(text.split("\n")[:-1], start=1)]
    step = 1 if file.stem == "metrics" else 0  # one line per round
    for number, (line, following) in enumerate(pairwise(lines), start=2):
        if following["round"] < line["round"] + step:
            raise corrupt_file_error(file, f"line {number} has round {following['round']} after {line['round']}")
    return lines


def participants(folder: Path) -> set[int]:
    """Return the clients that have a line in ``clients.jsonl``, which may be larger than the memory."""
    file = folder / "clients.jsonl"
    if not file.exists():
        return set()
    with open_regular_file(file) as stream:
        lines = enumerate(stream, start=1)
        return {_line(file, number, line.decode(errors="replace"), ("client",))["client"] for number, line in lines}


def missing_rounds(folder: Path, *, rounds: int | None) -> list[int]:
    """Return the rounds without a line in ``metrics.jsonl`` of a run that has completed ``rounds``; None: unknown."""
    present = {line["round"] for line in read_jsonl(folder / "metrics.jsonl")}
    return [round for round in range(1, (rounds or max(present, default=0)) + 1) if round not in present]


def incomplete_files(folder: Path, *, rounds: int | None) -> list[str]:
    """Return a line for every file of a run folder that lacks lines of a run that has completed ``rounds``."""
    files = [folder / f"{name}.jsonl" for name in SCHEMAS]
    problems = [f"{file}: 1 unreadable line" for file in files if _is_cut_off(file)]
    if missing := missing_rounds(folder, rounds=rounds):
        return [*problems, f"{folder / 'metrics.jsonl'}: no line of {format_rounds(missing)}"]
    expected = sum(line.get("clients", 0) for line in read_jsonl(folder / "metrics.jsonl"))
    if (count := _count_lines(folder / "clients.jsonl")) < expected:
        problems.append(f"{folder / 'clients.jsonl'}: {count} of {expected} lines")
    return problems


def format_rounds(rounds: Sequence[int]) -> str:
    """Return the first rounds of a list, as text."""
    shown = ", ".join(map(str, rounds[:5])) + (f" and {len(rounds) - 5} more" if len(rounds) > 5 else "")
    return f"round {shown}" if len(rounds) == 1 else f"rounds {shown}"


def _is_cut_off(file: Path) -> bool:
    """Return whether the last line has no line end."""
    try:
        with open_regular_file(file) as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) != b"\n"
    except OSError:  # missing or empty
        return False


def _count_lines(file: Path) -> int:
    try:
        with open_regular_file(file, max_bytes=sys.maxsize) as stream:  # it may be larger than the memory
            return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(2**20), b""))
    except FileNotFoundError:
        return 0


def _line(file: Path, line_number: int, text: str, required: Collection[str]) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt_file_error(file, f"line {line_number} is no JSON") from error
    if not isinstance(line, dict):
        raise corrupt_file_error(file, f"line {line_number} is no JSON object")
    for key in ("round", *required):
        if key not in line:
            raise corrupt_file_error(file, f"line {line_number} has no {key}")
    schema = SCHEMAS[file.stem]
    wrong = next((key for key, value in line.items() if key in schema and not schema[key](value)), None)
    if wrong is not None:
        raise corrupt_file_error(file, f"{wrong} in line {line_number} has a value that no run writes there")
    return line


def text(value: Any) -> bool:
    """Accept text."""
    return isinstance(value, str)


def finite_number(value: Any) -> bool:
    """Return whether it is a finite number that is safe to add up."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_ABS


def amount(value: Any) -> bool:
    """Return whether it is a finite number of at least zero."""
    return finite_number(value) and value >= 0


def count(minimum: int) -> Validator:
    """Accept integers of at least ``minimum``."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**53


def optional(validator: Validator) -> Validator:
    """Accept null, too."""
    return lambda value: value is None or validator(value)


def mapping_of(validator: Validator) -> Validator:
    """Accept objects whose values are valid."""
    return lambda value: isinstance(value, dict) and all(map(validator, value.values()))


def _cost(value: Any) -> bool:
    return mapping_of(amount)(value) and {"peak_memory", "flops"} <= value.keys()


def _base(value: Any) -> bool:
    return isinstance(value, dict) and all(count(1)(value.get(key)) for key in ("bytes", "clients"))


def _spectrum(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("singular_values"), list)
        and all(map(finite_number, value["singular_values"]))
        and all(count(1)(value.get(key)) for key in ("images", "dim"))
        and value["images"] * value["dim"] <= MAX_SPECTRUM_SIZE
        and text(value.get("split"))
    )


# By file name; other keys are not read.
SCHEMAS: dict[str, dict[str, Validator]] = {
    "metrics": {
        "round": count(1),
        **dict.fromkeys(("loss", "model_cosine", "layer_cosine"), optional(finite_number)),
        **dict.fromkeys(("seconds", "bytes_up", "bytes_down"), amount),
        "client_seconds": optional(amount),
        **dict.fromkeys(("virtual_seconds", "virtual_time"), amount),
        "clients": count(1),
        "dropped": mapping_of(text),
        **dict.fromkeys(("state_bytes", "evicted_states"), count(0)),
        "cost": _cost,
        "base": _base,
        "evaluation": mapping_of(finite_number),
        "units": mapping_of(text),
    },
    "clients": {
        "round": count(1),
        "client": count(0),
        "model": text,
        "cosine": mapping_of(finite_number),
        "virtual_seconds": amount,
        "base_bytes": count(0),
        **dict.fromkeys(("model_cosine", "layer_cosine"), optional(finite_number)),
    },
    "health": {"round": count(1), "client": optional(count(0)), "model": text, "spectrum": _spectrum},
}
