"""Text settings on the command line: paths and names have any characters, which Hydra's grammar refuses.

The value of a setting whose type is text (`fedssl.config.constraints`) is what stands behind ``key=``, unless it is
quoted as in Hydra, or ``null``. Interpolations ``${...}`` are resolved, also in quotes. With ``-m`` commas outside of
both separate values.
"""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedssl.config.constraints import constraint_of
from fedssl.config.overrides import parse, quote_value, to_text
from fedssl.errors import InputError

_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_INTERPOLATION = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
_ALL_QUOTED = re.compile(rf"{_QUOTED}(\s*,\s*{_QUOTED})*", re.DOTALL)
_FUNCTION = re.compile(r"\s*(choice|range|interval|glob|sort|shuffle|tag|extend_list)\(.*\)\s*", re.DOTALL)
_OF_MACHINE = {"engine", "tracker", "cache", "output_dir", "resume"}
_PATH_STARTS = ("/", "~", "./", "../", "file://", "\\")
_OF_HYDRA = ("hydra.sweep.dir", "hydra.run.dir")
_NEVER_SWEPT = (*_OF_HYDRA, "output_dir", "resume", "run_id")


def literal_values(overrides: Iterable[str], *, sweep: bool = False) -> list[str]:
    """Return the overrides, of which the values of text settings are quoted for Hydra; a second call changes nothing.

    ``sweep`` is whether commas separate the values of a sweep. Raises `InputError` for ``key==value``.
    """
    return [_literal(override.rstrip("\r\n"), sweep=sweep) for override in overrides]


def _literal(override: str, *, sweep: bool) -> str:
    key, equals, text = override.partition("=")
    name = key.lstrip("+")
    if not equals or not is_text(name) or (text.startswith("[") and _allows_lists(name)):
        # Hydra's grammar has no interpolation in another one, apart from quoted text.
        return f"{key}={quote_value(text)}" if re.fullmatch(_INTERPOLATION, text) else override
    if text.startswith("="):
        raise InputError(f"{override} has two equals signs; write {key}={text.lstrip('=')}")
    if sweep and name not in _NEVER_SWEPT:
        if _FUNCTION.fullmatch(text):
            return override
        values = re.findall(rf"(?:{_QUOTED}|{_INTERPOLATION}|[^,])+", text) or [""]
        if len(values) > 1 and _is_path(name, override) and _exists(text) and not all(map(_exists, values)):
            one, each = (shlex.quote(f"{key}={','.join(map(_in_quotes, some))}") for some in ([text], values))
            raise InputError(
                f"{override} is one path that exists, but {len(values)} values of a sweep; quote it as in {one}, or "
                f"each value as in {each}"
            )
        return f"{key}={','.join(map(_quoted, values))}"
    return f"{key}={_quoted(text)}"


def _quoted(text: str) -> str:
    text = text.strip()
    if _ALL_QUOTED.fullmatch(text) or text.lower() == "null":
        return text
    return quote_value(text)


def _in_quotes(text: str) -> str:
    """Return text in double quotes, which a shell's single quotes may contain, or else as `quote_value`."""
    return quote_value(text) if re.search(r'["\\$]', text) else f'"{text.strip()}"'


def _exists(text: str) -> bool:
    return os.path.exists(os.path.expanduser(text.strip()))  # noqa: PTH110, PTH111 - pathlib's raise for some texts


def is_text(key: str) -> bool:
    """Return whether a setting is a path or a name, by its dotted key."""
    constraint = constraint_of(key)
    return key in _OF_HYDRA or (constraint is not None and constraint.is_text)


def _allows_lists(key: str) -> bool:
    constraint = constraint_of(key)
    return constraint is not None and constraint.list_of is not None


def plain_override(override: str) -> str:
    """Return an override without the quotes that it does not need on the command line of a single run."""
    key, _, text = override.partition("=")
    if not re.fullmatch(_QUOTED, text, re.DOTALL):
        return override
    (parsed,) = parse([override])
    plain = f"{key}={parsed.value()}"
    try:
        same = [other.value() for other in parse(literal_values([plain]))] == [parsed.value()]
    except InputError:
        return override
    return plain if same else override


def shell_command(overrides: Iterable[str]) -> str:
    """Return the shell command of a run with these overrides, quoted for the shell alone wherever that suffices."""
    return shlex.join(["fedssl", *map(plain_override, overrides)])


def public_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the overrides without what belongs to one machine: engine, tracker, caches, and the folders of paths."""
    shown = []
    for override in parse(list(overrides)):
        key, text = override.get_key_element(), str(override.input_line)
        parts = override.key_or_group.split(".")
        if _OF_MACHINE.isdisjoint((parts[0], parts[-1])):
            value = _without_folders(override.value(), is_path=_is_path(override.key_or_group, text))
            shown.append(text if value == override.value() else f"{key}={to_text(value)}")
    return shown


def _is_path(key: str, override: str) -> bool:
    """Return whether the value is a path, and not the name of a model such as ``timm:NAME``."""
    constraint = constraint_of(key)
    is_file = key == "encoder.weights" and not re.search(r"=['\"]?\w+:[^/\\]", override)
    return is_file or (constraint is not None and constraint.kind is Path)


def _without_folders(value: Any, *, is_path: bool) -> Any:
    """Replace paths by their last components, in lists and mappings too."""
    if isinstance(value, str):
        return Path(value).name if is_path or value.startswith(_PATH_STARTS) else value
    if isinstance(value, list):
        return [_without_folders(item, is_path=is_path) for item in value]
    if isinstance(value, dict):
        return {key: _without_folders(item, is_path=is_path) for key, item in value.items()}
    return value


def user_path(text: str | Path) -> Path:
    """Return the path with the home folder in place of ``~`` or ``~user``; a RuntimeError if ``~`` has none."""
    path = Path(text)
    if path.parts[:1] == ("~",):
        return path.expanduser()
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's raises if there is no such user


def absolute_path(text: str | Path) -> Path:
    """Return the path from the root on, without ``..`` unless this is behind a symbolic link."""
    path = user_path(text).absolute()
    plain = Path(os.path.normpath(path))
    try:
        return plain if ".." in path.parts and plain.resolve() == path.resolve() else path
    except (OSError, ValueError, RuntimeError):  # a null character, or links that lead to each other
        return path


def absolute_setting(key: str, value: Any) -> str | None:
    """Return the absolute path that is the value of a setting; None if it is none, such as a column of masks."""
    constraint = constraint_of(key)
    is_path = constraint is not None and constraint.kind is Path and not (key.endswith(".cache") and value == "auto")
    is_path |= key.rpartition(".")[2] == "masks" and isinstance(value, str) and user_path(value).is_dir()
    return str(absolute_path(value)) if is_path and isinstance(value, str) else None


def path_of(text: str) -> Path:
    """Return the path behind ``key=``, without quotes of Hydra and with the home folder in place of ``~``."""
    return user_path(str(parse([f"text={_quoted(text)}"])[0].value()))
