"""Command-line words such as ``strategy=fedavg partition.alpha=0.1``: read, quoted, and their names checked.

A wrong name or choice is answered with one sentence that names the nearest valid ones.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException

from fedssl.config.renamed import check_renamed
from fedssl.errors import InputError

CONF = Path(__file__).resolve().parents[2] / "conf"


def parse(overrides: Sequence[str]) -> list[Override]:
    """The words as Hydra reads them; raises `InputError`."""
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        reason = " ".join(str(error).split())
        bare = [word for word in overrides if "=" not in word and not word.startswith("~")]
        if bare:
            raise InputError(
                f"{bare[0]} is not of the form key=value; write e.g. rounds=5 or strategy=fedavg"
            ) from error
        raise InputError(
            f"cannot read the command line: {reason}; write key=value, quoted where it has spaces"
        ) from error


def quote_value(text: str) -> str:
    """A value as Hydra reads it back, whatever is in it."""
    # In Hydra's quotes a backslash counts as an escape only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def config_groups(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Choices of each configuration group; one in a subfolder has its name before it, as in ``method=fedu/byol``.

    Parameters
    ----------
    folders : sequence of Path
        The user's own, which have groups as ``conf/`` does.
    """
    found: dict[str, list[str]] = {}
    for folder in (group for root in (CONF, *folders) for group in root.iterdir() if group.is_dir()):
        names = (file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))
        found[folder.name] = sorted({*found.get(folder.name, ()), *names})
    return {group: names for group, names in found.items() if names}


def check_choices(override: Override, *, group: str, choices: Sequence[str]) -> None:
    """Refuse, by an `InputError`, a choice that the group does not have."""
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
        raise InputError(f"{group}=glob({idle[0]}) finds nothing, and nothing in subfolders; name some of {listed}")


def check_run_id(name: object) -> None:
    """Refuse, by an `InputError`, what cannot name a run wherever its clients keep their states."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)):
        raise InputError(
            f"run_id={str(name)[:80]!r} is no name of a run; use 1 to 64 letters, digits, _ and -, or leave it out"
        )


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A question for the end of an error's first half; empty if nothing is near."""
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}" if close else ""
