"""Config directories and classes of the user: ``fedssl --config-dir DIR strategy=mine``.

``DIR`` has the groups of ``conf/`` with further files, whose ``_target_`` Python can import. The flag becomes the
override ``hydra.searchpath=['file:///DIR']``. It is saved with the run, and passed to every engine and to resumed runs.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedssl.config.literal import literal_values, user_path
from fedssl.config.overrides import CONF, did_you_mean, parse, quote_value
from fedssl.errors import InputError

SEARCHPATH_KEY = "hydra.searchpath"
FLAGS = ("--config-dir", "-cd")
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # which web pages show in place of hyphens


def expand_config_dir_flag(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments in which ``--config-dir DIR`` is an override before all others."""
    folders: list[str] = []
    others: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if not argument:
            raise InputError("an argument is empty; leave it out (a variable of the shell may be empty)")
        if argument[0] in _DASHES:
            hyphens = "--" if argument[0] == "\u2014" else "-"
            raise InputError(f"{argument} begins with a dash of a web page; write {hyphens}{argument.lstrip(_DASHES)}")
        flag, equals, value = argument.partition("=")
        if flag not in FLAGS:
            others.append(argument)
            continue
        folder = value if equals else next(remaining, "")
        if not folder:
            raise InputError(f"{flag} needs a folder; name the one with strategy/, method/ and so on")
        folders.append(folder)
    if not folders:
        return others
    folders += map(str, search_folders(others))
    others = [argument for argument in others if not _has_key(argument, SEARCHPATH_KEY)]
    first = next((index for index, argument in enumerate(others) if "=" in argument and argument[0] != "-"), 0)
    return [*others[:first], searchpath_override([_existing(folder) for folder in folders]), *others[first:]]


def normalize(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with absolute config directories and quoted text, see `fedssl.config.literal`."""
    overrides = literal_values(overrides)
    folders = search_folders(overrides)
    others = [override for override in overrides if not _has_key(override, SEARCHPATH_KEY)]
    return [searchpath_override(folders), *others] if folders else others


def search_folders(overrides: Sequence[str]) -> list[Path]:
    """Return the config directories that the overrides name, as absolute paths; `InputError` if one is invalid."""
    searchpaths = parse([override for override in overrides if _has_key(override, SEARCHPATH_KEY)])
    entries = searchpaths[-1].value() if searchpaths else []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise InputError(f"{SEARCHPATH_KEY}={entries} must be a list of folders; write --config-dir FOLDER instead")
    return [_existing(entry.removeprefix("file://")) for entry in entries]


def add_import_path(folders: Sequence[Path]) -> None:
    """Add the current folder to ``sys.path``, behind installed modules, if there are config directories."""
    here = str(Path.cwd())
    if folders and here not in sys.path:
        sys.path.append(here)


def check_targets(config: Mapping[str, Any]) -> None:
    """Raise `InputError` if a ``_target_`` in the config cannot be imported. Those of ``conf/`` are not imported."""
    for key, target in _targets(config, ""):
        if target not in installed_targets():
            locate(target, key=key)


def locate(target: str, *, key: str = "_target_") -> Any:
    """Import the class or function with a dotted name, which is the value of the setting ``key``."""
    module, _, name = target.rpartition(".")
    if not module or not all(part.isidentifier() for part in target.split(".")):
        raise InputError(f"{key}={target} is not the dotted name of a class or function, such as package.module.Class")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise InputError(
                f"{key}={target} cannot be imported, because there is no module {error.name}; install its "
                "package, or add its folder to PYTHONPATH"
            ) from error
        raise InputError(
            f"{key}={target} cannot be imported, because {module} needs {error.name}; install that"
        ) from error
    except Exception as error:  # importing runs the user's code, which may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"{key}={target} cannot be imported, because {module} fails with {reason}; correct that"
        ) from error
    value = vars(imported).get(name)
    if not callable(value):
        names = [public for public, value in vars(imported).items() if callable(value) and not public.startswith("_")]
        raise InputError(
            f"{key}={target} cannot be imported, because {module} has no class or "
            f"function {name}{did_you_mean(name, names)}; correct the name"
        )
    return value


def user_encoder(target: str, folders: Sequence[Path]) -> Callable[..., Any] | None:
    """Import the factory of a saved encoder if the user's config directories have it as a choice, else return None.

    A file must not select the code that loads it.
    """
    chosen = choice_targets("encoder", folders) - installed_targets()
    add_import_path(folders)
    return locate(target, key="encoder._target_") if target in chosen else None


def choice_targets(group: str, folders: Sequence[Path]) -> frozenset[str]:
    """Return every ``_target_`` of a group in ``conf/`` and in the user's config directories."""
    return frozenset(target for folder in (CONF, *folders) for target in _targets_in(folder / group))


@functools.cache
def installed_targets() -> frozenset[str]:
    """Return every ``_target_`` in ``conf/``."""
    return frozenset(_targets_in(CONF))


def _targets_in(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*.yaml"):
        text = file.read_text(encoding="utf-8", errors="replace")  # a user's comments may have another encoding
        yield from re.findall(r"^\s*_target_:\s*([\w.]+)", text, flags=re.MULTILINE)


def _targets(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if key == "_target_":
            yield f"{prefix}{key}", str(value)
        elif isinstance(value, Mapping):
            yield from _targets(value, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            inner = {f"{key}.{index}": item for index, item in enumerate(value) if isinstance(item, Mapping)}
            yield from _targets(inner, prefix)


def _existing(name: str) -> Path:
    folder = user_path(name).absolute()
    if not folder.is_dir():
        raise InputError(
            f"the config directory {folder} does not exist; set --config-dir to a folder with strategy/, method/ "
            "and so on"
        )
    installed = {file.relative_to(CONF) for file in CONF.rglob("*.yaml")}
    both = sorted(str(name) for name in installed if (folder / name).is_file())
    if both and folder.resolve() != CONF:
        raise InputError(f"{folder / both[0]} has the name of a file in conf/, which takes precedence; rename it")
    return folder


def _has_key(argument: str, key: str) -> bool:
    return argument.partition("=")[0] == key


def searchpath_override(folders: Sequence[Path]) -> str:
    """Return the override for the config directories."""
    return f"{SEARCHPATH_KEY}=[{','.join(quote_value(f'file://{folder}') for folder in dict.fromkeys(folders))}]"
