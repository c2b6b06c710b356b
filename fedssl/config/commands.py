"""Commands with options such as ``run=DIR``: their options, output files and encoder."""

import math
import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedssl.command_line import run_command
from fedssl.config.literal import literal_values, path_of
from fedssl.config.overrides import did_you_mean, parse
from fedssl.config.saved_run import resume_command, warn_unless_finished
from fedssl.config.targets import SEARCHPATH_KEY, expand_config_dir_flag
from fedssl.errors import InputError, sanitize

DATA_SET = "dataset."


def parse_arguments(commands: Mapping[str, ArgumentParser], parser: ArgumentParser) -> Namespace:
    """Return the arguments of a command, in any order, with its name as ``command``.

    ``parser`` parses everything else, such as ``--help``. On its own it refuses an argument behind an option.
    """
    first, *rest = sys.argv[1:] or [""]
    if first not in commands:
        return parser.parse_args()
    return commands[first].parse_intermixed_args(rest, Namespace(command=first))


def run_with_overrides(name: str, usage: str, run: Callable[[Sequence[str]], str]) -> int:
    """Run a command with overrides and print its text, or the usage; return the exit status, see `run_command`."""
    is_asked = not {"-h", "--help"}.isdisjoint(sys.argv[1:])
    if is_asked or not sys.argv[1:]:
        print(usage)
        return 0 if is_asked else 2
    return run_command(
        name, lambda: print(sanitize(run(_with_keys(expand_config_dir_flag(sys.argv[1:]), usage)), lines=True))
    )


def _with_keys(overrides: Sequence[str], usage: str) -> Sequence[str]:
    """Return the overrides; `InputError` for one without a key, such as a path without its option."""
    for override in overrides:
        if "=" in override or override.startswith(("~", "-")):
            continue
        remedy = "quote values with spaces"
        if os.access(override, os.F_OK) or len(overrides) == 1:  # `Path.exists` raises for long names
            key = "images" if "images=PATH" in usage else "dataset.path"
            if " run=" in usage:
                is_run = os.access(f"{override}/config.yaml", os.F_OK)
                key = "run" if is_run else "encoder" if override.endswith((".pt", ".onnx")) else key
            remedy = f"write {key}={shlex.quote(override)}"
        raise InputError(f"{override} does not have the form key=value; {remedy}")
    return overrides


def read_options(
    command: str, overrides: Sequence[str], *, keys: Collection[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the texts of options by key, and the settings of dataset=folder by key without prefix.

    Raise an `InputError` for other overrides and for options without a value.
    """
    options, settings = dict[str, str](), list[str]()
    for override in overrides:
        key, equals, text = override.partition("=")
        if key.startswith(DATA_SET):
            settings.append(override)
        elif key in keys and text:
            options[key] = text
        elif key in keys and equals:
            raise InputError(f"{override} has no value; write {key}=... or leave it out")
        elif key != SEARCHPATH_KEY:
            raise InputError(
                f"{override} has no effect on {command}{did_you_mean(key, keys)}; allowed are {', '.join(keys)} and "
                "settings of dataset=folder"
            )
    parsed = parse(literal_values(settings))
    return options, {override.key_or_group.removeprefix(DATA_SET): override.value() for override in parsed}


def check_effect(command: str, overrides: Sequence[str], *, groups: Collection[str]) -> None:
    """Raise an `InputError` for settings outside the groups, and for statistics, which are the encoder's."""
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").rpartition("@")[2]
        group = key.partition(".")[0]
        if key in (f"{DATA_SET}mean", f"{DATA_SET}std"):
            raise InputError(
                f"{override} has no effect on {command}, which standardizes images as in the encoder's training; "
                "remove it"
            )
        if group in groups or key == SEARCHPATH_KEY:
            continue
        is_final = key == "final_evaluation" and "evaluation" in groups
        remedy = f"write {override.removeprefix('final_')}" if is_final else "remove it"
        raise InputError(
            f"{override} has no effect on {command}; {remedy} (allowed are settings of {', '.join(groups)})"
        )


def source_of(options: Mapping[str, str]) -> Path:
    """Return the path of ``run=DIR`` or ``encoder=FILE``; `InputError` for none or both."""
    if ("run" in options) == ("encoder" in options):
        raise InputError("give either run=DIR, the folder of a finished run, or encoder=FILE, its encoder.pt")
    path = path_of(options["run" if "run" in options else "encoder"])
    if "run" in options and path.is_file():
        raise InputError(f"run={path} is a file; give the folder of a finished run, or encoder={path}")
    return path


def number_of(key: str, text: str, low: float, high: float, *, whole: bool = True, further: str = "") -> float:
    """Return a number in [low, high]; `InputError` for anything else, with ``further`` choices."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or (whole and value != int(value)):
        raise InputError(f"{key}={text} must be a {'whole ' * whole}number from {low:g} to {high:,g}{further}")
    return value


def flag_of(key: str, text: str) -> bool:
    """Return a truth value; `InputError` for anything else."""
    if text.lower() not in ("true", "false"):
        raise InputError(f"{key}={text} is not valid; choose {key}=true or {key}=false")
    return text.lower() == "true"


def bands_of(text: str, channels: int) -> tuple[int, ...]:
    """Return the channels, from 0, of red, green and blue, or of gray, of text such as ``3,2,1``, which is from 1."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.strip("[]").split(",")]
    if len(numbers) not in (1, 3) or not all(1 <= number <= channels for number in numbers):
        example = ",".join(str(min(number, channels)) for number in (1, 2, 3))
        raise InputError(f"bands={text} must be one or three channels from 1 to {channels}, such as bands={example}")
    return tuple(number - 1 for number in numbers)


def check_output(key: str, file: Path, *endings: str) -> None:
    """Raise an `InputError` unless a file has one of the endings and is in a folder that can be written."""
    if file.suffix.lower() not in endings:
        raise InputError(f"{key}={file} does not end in {', '.join(endings)}; choose a name that does")
    if not file.absolute().parent.is_dir():
        raise InputError(f"{key}={file} is in a folder that does not exist; create {file.parent} first")
    if not os.access(file.absolute().parent, os.W_OK):
        raise InputError(f"{key}={file} is in a folder that you may not write; choose another one")


def check_new(key: str, file: Path) -> None:
    """Raise an `InputError` if a file exists."""
    if file.exists() or file.is_symlink():
        raise InputError(f"{file} exists already; choose another file with {key}=")


def encoder_file(source: Path) -> Path:
    """Return the encoder file of a run's folder, or the file itself; `InputError` if it does not exist."""
    file = source / "encoder.pt" if source.is_dir() else source
    if not file.is_file():
        advice = "give the folder of a finished run"
        if (source / "config.yaml").is_file():
            advice = f"finish the run with {resume_command(source)}"
        several = sorted(file.parent.glob("encoder-*.pt"))
        if several:  # the run has several models
            advice = f"the run has {len(several)} encoders; give one of them: {shlex.quote(f'encoder={several[0]}')}"
        raise InputError(f"{file} does not exist; {advice}")
    warn_unless_finished(file)
    return file
