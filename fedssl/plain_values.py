"""Settings as plain values, which no configuration library can resolve or call, and by dotted keys.

Hydra calls what a key ``_target_`` names, and OmegaConf resolves ``${...}``, at any depth. Every reader of settings
from outside passes them through `plain_values` first.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from fedssl.errors import sanitize

MAX_DEPTH = 32  # of nested values
_MAX_SIZE = 2**22  # number of values and of characters
# Special keys that the settings of a run may have.
RUN_KEYS = frozenset({"_target_", "_partial_", "_args_", "_convert_", "_recursive_"})


def plain_values(value: Any, name: str, *, special: Collection[str] | None = ()) -> Any:
    """Return a copy of settings; raise a `ValueError` unless they are plain values.

    Plain are None, booleans, numbers, text without ``${``, and lists and dictionaries of these, to a limited depth and
    size. Keys are text or integers, and none begins with an underscore, except those in ``special`` (None: any). A
    caller that allows them calls nothing by them, or composed the settings itself. ``name`` is for the error.
    """
    left = [_MAX_SIZE]

    def plain(value: Any, name: str, depth: int) -> Any:
        left[0] -= 1 + (len(value) if isinstance(value, str) else 0)
        if depth > MAX_DEPTH or left[0] < 0:
            raise ValueError(f"{name.partition('.')[0]} is nested too deeply or too long")
        if isinstance(value, Mapping):
            for key in value:
                _check_key(key, name, special)
            return {key: plain(inner, f"{name}.{sanitize(key)[:40]}", depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner, f"{name}.{number}", depth + 1) for number, inner in enumerate(value)]
        if isinstance(value, str):
            _check_text(value, name)
        elif not isinstance(value, bool | int | float | None):
            raise ValueError(f"{name} is a {type(value).__name__}, which is no plain value")
        return value

    return plain(value, name, 0)


def _check_key(key: Any, name: str, special: Collection[str] | None) -> None:
    if isinstance(key, int):
        return
    if not isinstance(key, str):
        raise ValueError(f"{name} has the key {key!r}, which is no name")
    _check_text(key, name)
    if key.startswith("_") and special is not None and key not in special:
        raise ValueError(f"{name} has the key {key[:40]!r}, which could select code")


def _check_text(text: str, name: str) -> None:
    if "${" in text:
        raise ValueError(f"{name} has an interpolation, ${{...}}, which is not resolved")
    if text == "???":
        raise ValueError(f"{name} has the text ???, which stands for a missing value")


def plain_config(value: Any) -> Any:
    """Return a config, whose nodes are slow to read one by one, as dictionaries and lists; another value itself."""
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def flatten(node: Mapping[Any, Any], prefix: str = "", *, inner: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; with ``inner`` also those of nested nodes."""
    node = plain_config(node)
    for key in node:
        value, name = node[key], prefix + str(key)
        if isinstance(value, Mapping):
            if inner:
                yield name, value
            yield from flatten(value, f"{name}.", inner=inner)
        else:
            yield name, plain_config(value)


def whole_numbers(value: Any) -> Any:
    """Return a value with each float that is a whole number as an integer, because 1.0 equals 1."""
    if isinstance(value, Mapping):
        return {key: whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_text(value: Any) -> str:
    """Return a setting as printable text, which is the same for 1 and 1.0."""
    return sanitize(whole_numbers(value))


def diff(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ between two configs, with both values."""
    old, new = dict(flatten(left)), dict(flatten(right))
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
