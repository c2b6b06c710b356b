"""Overrides from keyword arguments of Python: ``partition__alpha=0.1`` is ``partition.alpha=0.1``."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedssl.config.literal import literal_values
from fedssl.config.overrides import parse, to_text
from fedssl.errors import InputError

# A value of a setting. Arrays and scalars of NumPy, paths and sequences of these are accepted.
Value: TypeAlias = (
    "str | float | bool | os.PathLike[str] | np.generic | np.ndarray | Sequence[Value] | Mapping[str, Value] | None"
)


_OF_SWEEPS = ("sweep.", "hydra.sweep", "hydra.run")


def to_overrides(texts: Sequence[str], settings: Mapping[str, Value]) -> list[str]:
    """Return overrides of the command line for texts such as ``rounds=5``, and for values of settings.

    Two underscores in a name stand for a dot, as in scikit-learn. A text is a text: ``"null"``, ``"1"`` and all special
    characters are kept. Raise `InputError` for anything else, and for several values of a setting.
    """
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{text!r} is not a text such as 'rounds=5'; give values by keyword, e.g. rounds=5")
        if re.match("--?[a-z]", text):
            raise InputError(f"{text} is a flag of the command line; call fedssl.run for each run, with settings only")
    literal = literal_values(texts)
    for override in parse(literal):
        if override.is_sweep_override():
            raise InputError(f"{override.input_line} has several values; call fedssl.run in a loop, once for each")
    given = list(_overrides({name.replace("__", "."): value for name, value in settings.items()}))
    if of_sweep := [override for override in (*texts, *given) if override.lstrip("+~").startswith(_OF_SWEEPS)]:
        raise InputError(f"{of_sweep[0]} is an option of the command line's sweeps and runs; leave it out")
    return [*literal, *given]


def _overrides(settings: Mapping[str, Value]) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _overrides({f"{key}.{name}": inner for name, inner in value.items()})
        elif isinstance(value, str | os.PathLike) and not str(value):
            raise InputError(f"{key} is empty; set a value, or None")
        else:
            yield f"{key}={to_text(_plain(key, value))}"


def _plain(key: str, value: Value) -> Any:
    """Return a value that YAML has: numbers of NumPy become Python's, and paths texts."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):  # an item of a list
        return {name: _plain(key, inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(key, inner) for inner in value]
    raise InputError(
        f"{key} has the type {type(value).__name__}; set a text, a number, True, False, None, a path, a list or a dict"
    )
