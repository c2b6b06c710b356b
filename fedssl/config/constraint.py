"""Type and range of one setting."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LARGE = 1e6  # a larger weight, rate or noise overflows float32 within a round
SMALL = 1e-9  # a smaller one vanishes
MAX_INTEGER = 2**31 - 1
_REPRESENTABLE = 1e-30, 1e30  # sizes of numbers other than 0 that float32 has, and whose inverse it has
_NAMES = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true and false"),
    str: ("a name", "names"),
    Path: ("a path", "paths"),
    dict: ("a mapping", "mappings"),
}


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Type and range of a setting."""

    # int, float (which accepts integers), bool, str, Path (a string that names a file or folder), or dict, a mapping of
    # constrained settings
    kind: type = float
    choices: tuple[Any, ...] = ()  # allowed values in place of a type; empty for numbers
    minimum: float = -math.inf  # ``minimum <= value``
    above: float = -math.inf  # ``above < value``
    below: float = math.inf  # ``value < below``
    maximum: float = math.inf  # ``value <= maximum``
    optional: bool = False  # whether null is allowed
    is_list: bool = False  # whether the value is a list of constrained items
    is_range: bool = False  # whether the value is a list [low, high] of two constrained numbers, low <= high
    list_of: "Constraint | None" = None  # a list of these is allowed too

    @property
    def is_text(self) -> bool:
        """Return whether the value is one text."""
        return self.kind in (str, Path) and not self.choices and not self.is_list

    def allows(self, value: Any) -> bool:
        """Return whether a value is valid."""
        if value is None:
            return self.optional
        if self.is_list or self.is_range:
            valid = _is_list(value) and all(self._allows_item(item) for item in value)
            return valid and (self.is_list or (len(value) == 2 and value[0] <= value[1]))
        if self.list_of is not None and _is_list(value):
            return all(self.list_of.allows(item) for item in value)
        return self._allows_item(value)

    def _allows_item(self, value: Any) -> bool:
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if self.kind in (str, Path, dict):
            return isinstance(value, Mapping if self.kind is dict else str)
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if not isinstance(value, int if self.kind is int else int | float):
            return False
        if not (value == 0 or _is_representable(value)):
            return False
        return self.minimum <= value <= self.maximum and self.above < value < self.below

    def describe(self, value: Any) -> str:
        """Return what an invalid value must be, e.g. ``a number above 0 and at most 1, or null``."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not math.isfinite(value):
            return str(self).replace("number", "finite number", 1)
        if is_number and -math.inf < self.above < value < self.minimum:  # a technical limit
            return f"at least {self.minimum:g}"
        if is_number and value and self.minimum <= value <= self.maximum and not _is_representable(value):
            return "a number whose size is from {:g} to {:g}".format(*_REPRESENTABLE)
        return (
            f"at most {self.maximum if self.maximum % 1 else int(self.maximum):,}"
            if is_number and value > self.maximum
            else str(self)
        )

    def __str__(self) -> str:
        """Return the type and the range, without technical limits such as `MAX_INTEGER`, `LARGE` and `SMALL`."""
        name = " or ".join(map(str, self.choices)) or _NAMES[self.kind][self.is_list or self.is_range]
        form = "a list [low, high] of " if self.is_range else "a list of " * self.is_list
        other = "" if self.list_of is None else f", or {replace(self.list_of, is_list=True)}"
        bounds = {"of at least": self.minimum, "above": self.above, "below": self.below, "at most": self.maximum}
        bounds |= {"at most": math.inf} if self.maximum >= LARGE else {}
        bounds |= {"of at least": -math.inf} if self.above > -math.inf else {}
        range_ = " and ".join(f"{bound} {value:g}" for bound, value in bounds.items() if abs(value) < math.inf)
        range_ = re.sub(r"of at least (.*) and at most (.*)", r"from \1 to \2", range_)
        return f"{form}{name} {range_}".rstrip() + other + ", or null" * self.optional


def _is_representable(value: float) -> bool:
    smallest, largest = _REPRESENTABLE
    return smallest <= abs(value) <= largest


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)  # OmegaConf's lists are sequences too


def as_yaml(value: Any) -> Any:
    """Return a value as YAML writes it, for an error message; text that looks like another value is quoted."""
    if isinstance(value, str) and re.fullmatch(r"[-+.\d_]+(e[-+]?\d+)?|true|false|null", value, re.IGNORECASE):
        return repr(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return list(value) if isinstance(value, tuple) else value


def integer(minimum: float, maximum: float = MAX_INTEGER) -> Constraint:
    """Return the constraint of an integer in a range."""
    return Constraint(kind=int, minimum=minimum, maximum=maximum)


def choice(*choices: Any) -> Constraint:
    """Return the constraint of one of some values."""
    return Constraint(choices=choices)


def optional(constraint: Constraint) -> Constraint:
    """Let a constraint allow null."""
    return replace(constraint, optional=True)


def list_of(constraint: Constraint) -> Constraint:
    """Return the constraint of a list of constrained items."""
    return replace(constraint, is_list=True)


def range_of(constraint: Constraint) -> Constraint:
    """Return the constraint of a list [low, high] of two constrained numbers."""
    return replace(constraint, is_range=True)


def all_of(constraint: Constraint, *names: str) -> dict[str, Constraint]:
    """Give the same constraint to several settings."""
    return dict.fromkeys(names, constraint)
