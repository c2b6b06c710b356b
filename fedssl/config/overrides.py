"""Parsing, quoting and name checks of overrides such as ``strategy=fedavg partition.alpha=0.1``.

The error for an unknown name or choice suggests the closest valid ones.
"""

import difflib
import functools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf

from fedssl.config.constraints import constraint_of
from fedssl.config.hydra_internals import ChoiceSweep, Glob, IntervalSweep, Override, parse_overrides
from fedssl.errors import InputError

CONF = Path(__file__).resolve().parents[2] / "conf"
_KEYWORDS = ("null", "true", "false", "inf", "nan")  # of Hydra's grammar


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raise `InputError` if they are invalid."""
    return [_parsed(override) for override in overrides]


def _parsed(override: str) -> Override:
    try:
        return parse_overrides([override])[0]
    except HydraException as error:
        if "=" not in override and not override.startswith("~"):
            raise InputError(
                f"{override} does not have the form key=value; write e.g. rounds=5 or strategy=fedavg, without spaces"
            ) from error
        if re.search(r"\s[\w.]+=", override):
            raise InputError(f"{override!r} has several settings; write each as a word of its own") from error
        raise InputError(
            f"the command line cannot be parsed at {override!r}; write key=value without a space "
            "before =, and quote special characters, as in \"key='a, b'\""
        ) from error


def by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Return the last override of every key."""
    return {override.partition("=")[0]: override for override in overrides}


def partition_by_key(overrides: Iterable[str], key: str) -> tuple[list[str], list[str]]:
    """Return the overrides of other keys, and those of this key."""
    mine = [override for override in overrides if override.partition("=")[0].lstrip("+") == key]
    return [override for override in overrides if override not in mine], mine


def key_and_group(override: str) -> set[str]:
    """Return the key of an override, and the first part of its place in the config: that of a group is behind ``@``."""
    key = override.partition("=")[0]
    return {key, key.lstrip("+~").rpartition("@")[2].split(".")[0]}


def split_words(name: str, text: str) -> list[str]:
    """Split the text of a setting into overrides, as a shell does; raise `InputError` for an open quote."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{name} has {text!r}, which cannot be split into words ({error}); quote it fully") from error


def quote_value(text: str) -> str:
    """Quote a value for Hydra's grammar, whatever characters it has."""
    # In Hydra's quotes a backslash counts as an escape only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def to_text(value: Any) -> str:
    """Format a value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{to_text(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(to_text, value))}]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_]\w*", value) and value.lower() not in _KEYWORDS
        return value if plain else quote_value(value)
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | NoneType) else repr(value)


def config_groups(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Return the choices (e.g. ``fedu/byol``) of the config groups in ``conf/`` and the user's config directories."""
    choices = {group: list(names) for group, names in _groups_of(CONF).items()}
    for root in folders:
        for group, names in _groups_of.__wrapped__(root).items():
            choices[group] = sorted({*choices.get(group, ()), *names})
    return choices


@functools.cache
def _groups_of(root: Path) -> dict[str, list[str]]:
    groups = [folder for folder in root.iterdir() if folder.is_dir()]
    files = {folder.name: [file.relative_to(folder) for file in folder.rglob("*.yaml")] for folder in groups}
    return {group: sorted(name.with_suffix("").as_posix() for name in names) for group, names in files.items() if names}


def check_choices(override: Override, *, group: str, choices: Sequence[str]) -> None:
    """Raise `InputError` if the group has no such choice."""
    value = override.value()
    names = value.list if isinstance(value, ChoiceSweep) else [value]
    listed = ", ".join(choices)
    if not override.is_delete() and any(name is None or isinstance(name, list) for name in names):
        none = f"write {group}=none, or " if "none" in choices and None in names else ""
        raise InputError(f"{override.input_line} selects no choice of {group}; {none}choose one of {listed}")
    unknown = [str(name) for name in names if isinstance(name, str) and name not in choices]
    if unknown:
        is_path = group == "dataset" and re.search(r"[/\\~.]", unknown[0])
        hint = f"; set dataset=folder dataset.path={unknown[0]}" if is_path else did_you_mean(unknown[0], choices)
        raise InputError(f"{group}={unknown[0]} does not exist{hint}; choose one of {listed}")
    patterns: list[str] = value.include if isinstance(value, Glob) else []
    idle = [pattern for pattern in patterns if not Glob(include=[pattern]).filter([c for c in choices if "/" not in c])]
    if idle:
        raise InputError(f"{group}=glob({idle[0]}) matches no choice outside subfolders; name some of {listed}")


def check_single(overrides: Sequence[str]) -> None:
    """Raise `InputError` if an override of a single run sweeps over values."""
    for override in parse(overrides):
        if override.key_or_group.split(".")[0] == "sweep":
            raise InputError(f"{override.input_line} is an option of a sweep; add -m, or leave it out")
        if override.is_sweep_override():
            key, _, values = str(override.input_line).partition("=")
            constraint = constraint_of(key)
            other = ""
            if constraint is not None and (constraint.is_list or constraint.is_range or constraint.list_of):
                other = f", or write {key}=[{values}] for a list"
            elif constraint is not None and constraint.kind is float and re.fullmatch(r"-?\d+,\d+", values):
                other = f", or write a decimal point: {key}={values.replace(',', '.')}"
            raise InputError(f"{override.input_line} sweeps over values; add -m to run each{other}")


def check_sweep(overrides: Sequence[str]) -> None:
    """Raise `InputError` if the overrides of a sweep are not those of one."""
    parsed = parse(overrides)
    own_sweeper = any(override.key_or_group == "hydra/sweeper" for override in parsed)
    for override in parsed:
        value = override.value()
        if override.key_or_group == "output_dir":
            raise InputError(f"{override.input_line} is the folder of a single run; set hydra.sweep.dir for a sweep")
        if override.key_or_group == "pause_after":
            raise InputError(f"{override.input_line} is for a single run; set sweep.reduction_factor to prune jobs")
        if not override.is_sweep_override() or own_sweeper:
            continue
        if isinstance(value, IntervalSweep):
            raise InputError(f"{override.input_line} needs a sweeper that samples; list the values, or use range(0,5)")
        if isinstance(value, Glob):
            if override.key_or_group not in config_groups():
                raise InputError(f"{override.input_line} selects choices of a group; list the values instead")
        elif next(override.sweep_iterator(), None) is None:
            raise InputError(f"{override.input_line} has no values; list them, or use e.g. range(0,5)")


def check_run_id(name: object) -> None:
    """Raise `InputError` if the name is not a valid folder name for client states."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)):
        raise InputError(
            f"run_id={str(name)[:80]!r} is not a valid run id; use 1 to 64 letters, digits, _ and -, or leave it out"
        )


def choices_with(key: str) -> str:
    """Return a suggestion of choices that have a setting which the selected one lacks; empty if there are none."""
    group, _, name = key.partition(".")
    files = [CONF / group / f"{choice}.yaml" for choice in config_groups().get(group, ()) if "/" not in choice]
    having = [
        file.stem
        for file in files
        if file.is_file() and _has(OmegaConf.to_container(OmegaConf.load(file)), name.split("."))
    ]
    return f", but {group}={'|'.join(having)} has it: select it, or leave out {key}" if having else ""


def _has(node: Any, parts: Sequence[str]) -> bool:
    return not parts or (isinstance(node, dict) and parts[0] in node and _has(node[parts[0]], parts[1:]))


def suggest_setting(key: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown setting: settings with its last component, or with a similar key."""
    keys = [other for other in dict.fromkeys(known) if not other.rpartition(".")[2].startswith("_")]  # no _target_
    same = [other for other in keys if other.rpartition(".")[2] == key.rpartition(".")[2]]
    if same:
        return f"; did you mean {' or '.join(sorted(same, key=len)[:3])}"
    close = difflib.get_close_matches(key, keys)
    if not close:
        names = {other.rpartition(".")[2]: other for other in reversed(keys)}
        close = [names[name] for name in difflib.get_close_matches(key.rpartition(".")[2], names)]
    return f"; did you mean {' or '.join(close)}" if close else ""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a suggestion for an error message; empty if no choice is similar."""
    lower = {choice.lower(): choice for choice in choices}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
    return f"; did you mean {' or '.join(close)}" if close else ""
