"""Classes and settings of the user's own: ``fedssl --config-dir DIR strategy=mine``.

``DIR`` has the folders of ``conf/`` with files of its own, whose ``_target_`` names what Python can import. It travels
as one of the words, ``hydra.searchpath=['file:///DIR']``, which Hydra knows: so it is saved with the run and reaches
every engine, a resumed run and the command that repeats the run.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedssl.config.overrides import CONF, did_you_mean, parse, quote_value
from fedssl.config.renamed import current_target
from fedssl.errors import InputError

SEARCHPATH_KEY = "hydra.searchpath"
FLAGS = ("--config-dir", "-cd")


def expand_config_dir_flag(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line, with ``--config-dir DIR`` as a word before the first other word.

    Raises
    ------
    InputError
        The folder is missing.
    """
    folders: list[str] = []
    others: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        flag, equals, value = argument.partition("=")
        if flag not in FLAGS:
            others.append(argument)
            continue
        folder = value if equals else next(waiting, "")
        if not folder:
            raise InputError(f"{flag} names no folder; give the one that holds strategy/, method/ and so on")
        folders.append(folder)
    if not folders:
        return others
    place = next((number for number, argument in enumerate(others) if _is_word(argument, SEARCHPATH_KEY)), None)
    if place is not None:
        folders += [str(folder) for folder in search_folders([others.pop(place)])]
    place = next((number for number, argument in enumerate(others) if "=" in argument and argument[0] != "-"), 0)
    return [*others[:place], searchpath_override([_existing(folder) for folder in folders]), *others[place:]]


def normalize_searchpath(overrides: Sequence[str]) -> list[str]:
    """Return the words, with the user's folders as absolute paths; raises `InputError` for a missing folder."""
    folders = search_folders(overrides)
    others = [word for word in overrides if not _is_word(word, SEARCHPATH_KEY)]
    return [searchpath_override(folders), *others] if folders else others


def search_folders(overrides: Sequence[str]) -> list[Path]:
    """Return the user's folders that the words name, absolute.

    Raises
    ------
    InputError
        A folder does not exist, is no folder of settings, or has a file that fedssl has as well: which of the two is
        meant, nobody could tell.
    """
    found = [override.value() for override in parse([word for word in overrides if _is_word(word, SEARCHPATH_KEY)])]
    entries = found[-1] if found else []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise InputError(f"{SEARCHPATH_KEY}={entries} must be a list of folders; write --config-dir FOLDER instead")
    return [_existing(entry.removeprefix("file://")) for entry in entries]


def add_import_path(overrides: Sequence[str]) -> None:
    """Let Python import from the current folder, as ``python -m`` does, if the words name a folder of the user's.

    It comes last: what is installed is not replaced by a file that happens to lie there.
    """
    here = str(Path.cwd())
    if search_folders(overrides) and here not in sys.path:
        sys.path.append(here)


def check_targets(node: Mapping[str, Any], *, prefix: str = "") -> None:
    """Refuse, by an `InputError`, a ``_target_`` anywhere in the settings that cannot be imported.

    Those of ``conf/`` are known to be good and are not imported.
    """
    for key, target in _targets(node, prefix):
        if target not in installed_targets():
            locate(target, key=key)


def locate(target: str, *, key: str = "_target_") -> Any:
    """Return the class or function of that dotted name.

    Parameters
    ----------
    target : str
    key : str
        The setting that names it, for the error.

    Raises
    ------
    InputError
        It cannot be imported.
    """
    if (new := current_target(target)) != target:
        raise InputError(f"{key}={target} is {new} now; write that")
    module, _, name = target.rpartition(".")
    if not module or not all(part.isidentifier() for part in target.split(".")):
        raise InputError(f"{key}={target} is not the dotted name of a class or function, such as package.module.Class")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise InputError(
                f"{key}={target} cannot be imported, for there is no module {error.name}; install the package that has "
                "it, or put the folder that holds it on PYTHONPATH"
            ) from error
        raise InputError(f"{key}={target} cannot be imported, for {module} needs {error.name}; install that") from error
    except Exception as error:  # importing runs the user's code, which may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"{key}={target} cannot be imported, for {module} fails with {reason}; correct that"
        ) from error
    found = vars(imported).get(name)
    if not callable(found):
        names = [one for one, value in vars(imported).items() if callable(value) and not one.startswith("_")]
        raise InputError(
            f"{key}={target} cannot be imported, for {module} has no class or function "
            f"{name}{did_you_mean(name, names)}; "
            "correct the name"
        )
    return found


def user_encoder(target: str, overrides: Sequence[str]) -> Callable[..., Any] | None:
    """Return what builds a saved encoder that the user's folders have as a choice; None if it is none of theirs.

    Only folders that the words name count: a file must not choose the code that reads it.
    """
    chosen = choice_targets("encoder", search_folders(overrides)) - installed_targets()
    return locate(target, key="encoder._target_") if target in chosen else None


def choice_targets(group: str, folders: Sequence[Path]) -> frozenset[str]:
    """Return what the files of a group name as ``_target_``, in ``conf/`` and in the user's folders."""
    return frozenset(target for folder in (CONF, *folders) for target in _targets_in(folder / group))


@functools.cache
def installed_targets() -> frozenset[str]:
    """Return every ``_target_`` in ``conf/``."""
    return frozenset(_targets_in(CONF))


def _targets_in(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*.yaml"):
        yield from re.findall(r"^\s*_target_:\s*([\w.]+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _targets(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if key == "_target_":
            yield f"{prefix}{key}", str(value)
        elif isinstance(value, Mapping):
            yield from _targets(value, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            inner = {f"{key}.{number}": one for number, one in enumerate(value) if isinstance(one, Mapping)}
            yield from _targets(inner, prefix)


def _existing(entry: str) -> Path:
    folder = Path(entry).expanduser().absolute()
    if not folder.is_dir():
        raise InputError(
            f"the folder of settings {folder} does not exist; name it with --config-dir, it holds strategy/, method/ "
            "and so on"
        )
    own = {file.relative_to(CONF) for file in CONF.rglob("*.yaml")}
    both = sorted(str(name) for name in own if (folder / name).is_file())
    if both and folder.resolve() != CONF:
        raise InputError(f"{folder / both[0]} has the name of a file of fedssl's own, which would win; rename it")
    return folder


def _is_word(argument: str, key: str) -> bool:
    return argument.partition("=")[0] == key


def searchpath_override(folders: Sequence[Path]) -> str:
    """The word that names the user's folders."""
    return f"{SEARCHPATH_KEY}=[{','.join(quote_value(f'file://{folder}') for folder in dict.fromkeys(folders))}]"
