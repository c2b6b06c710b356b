"""Parsing, quoting and name checks of overrides such as ``strategy=fedavg partition.alpha=0.1``.

The error for an unknown name or choice suggests the closest valid ones.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.errors import HydraException

from fedssl.config.compat import ChoiceSweep, Glob, Override, parse_overrides
from fedssl.config.renamed import check_renamed
from fedssl.errors import InputError

CONF = Path(__file__).resolve().parents[2] / "conf"


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raise `InputError` if they are invalid."""
    try:
        return parse_overrides(overrides)
    except HydraException as error:
        reason = " ".join(str(error).split())
        bare = [override for override in overrides if "=" not in override and not override.startswith("~")]
        if bare:
            raise InputError(
                f"{bare[0]} does not have the form key=value; write e.g. rounds=5 or strategy=fedavg"
            ) from error
        raise InputError(
            f"the command line cannot be parsed: {reason}; write key=value, and quote values with spaces"
        ) from error


def quote_value(text: str) -> str:
    """Quote a value for Hydra's grammar, whatever characters it has."""
    # In Hydra's quotes a backslash counts as an escape only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def config_groups(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Return the choices of each config group; those in a subfolder are named like ``fedu/byol``.

    Parameters
    ----------
    folders : sequence of Path
        Config directories of the user, with the same groups as ``conf/``.
    """
    found: dict[str, list[str]] = {}
    for folder in (group for root in (CONF, *folders) for group in root.iterdir() if group.is_dir()):
        names = (file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))
        found[folder.name] = sorted({*found.get(folder.name, ()), *names})
    return {group: names for group, names in found.items() if names}


def check_choices(override: Override, *, group: str, choices: Sequence[str]) -> None:
    """Raise `InputError` if the group has no such choice."""
    value = override.value()
    names = value.list if isinstance(value, ChoiceSweep) else [value]
    listed = ", ".join(choices)
    unknown = [str(name) for name in names if isinstance(name, str) and name not in choices]
    for name in unknown:
        check_renamed(f"{group}={name}")
    if unknown:
        raise InputError(
            f"{group}={unknown[0]} does not exist{did_you_mean(unknown[0], choices)}; choose one of {listed}"
        )
    patterns: list[str] = value.include if isinstance(value, Glob) else []
    idle = [pattern for pattern in patterns if not Glob(include=[pattern]).filter([c for c in choices if "/" not in c])]
    if idle:
        raise InputError(f"{group}=glob({idle[0]}) matches no choice outside subfolders; name some of {listed}")


def check_run_id(name: object) -> None:
    """Raise `InputError` if the name is not a valid folder name for client states."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)):
        raise InputError(
            f"run_id={str(name)[:80]!r} is not a valid run id; use 1 to 64 letters, digits, _ and -, or leave it out"
        )


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a suggestion for an error message; empty if no choice is similar."""
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}" if close else ""
