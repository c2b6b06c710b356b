"""Undocumented names of Hydra 1.3: parsing the command line, and parsing, expanding and applying overrides."""

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, OverrideType
from omegaconf import DictConfig

from fedssl.errors import InputError

__all__ = [
    "ChoiceSweep",
    "Glob",
    "IntervalSweep",
    "Override",
    "apply_overrides",
    "expand_sweep",
    "parse_overrides",
    "split_arguments",
]


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raise `HydraException` if one is invalid."""
    return [copy.copy(_parse_override(override)) for override in overrides]  # `apply_overrides` changes types


@functools.lru_cache(maxsize=4096)
def _parse_override(override: str) -> Override:
    """Parse one override, which needs about 1 ms and is done at several places."""
    return OverridesParser.create().parse_overrides([override])[0]


def expand_sweep(overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the overrides of every job of a sweep, in the order of Hydra's basic sweeper.

    ``groups`` are the choices of each group, for `Glob`.
    """
    values: dict[str, list[str]] = {}
    for override in parse_overrides(overrides):
        key, value = override.get_key_element(), override.value()
        if isinstance(value, Glob):
            choices = [choice for choice in groups[override.key_or_group] if "/" not in choice]
            values[key] = [f"{key}={choice}" for choice in value.filter(choices)]
        elif override.is_sweep_override():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            values[key] = [str(override.input_line)]
    return [list(job) for job in itertools.product(*values.values())]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags with their values, and the overrides, in any order; raise `InputError` for an unknown flag."""
    parser = get_args_parser()

    # argparse's `error` prints the usage and exits, and has no hook
    def raise_error(message: str) -> NoReturn:
        raise InputError(f"{message}; `fedssl --hydra-help` lists all flags")

    parser.error = raise_error  # type: ignore[method-assign]
    overrides: list[str] = parser.parse_intermixed_args(list(arguments)).overrides
    flags = list(arguments)
    for override in overrides:
        flags.remove(override)
    return flags, overrides


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Set the values of ``overrides`` in a composed config; settings in the items of a list may be new."""
    for override in overrides:
        if any(part.isdecimal() for part in override.key_or_group.split(".")):
            override.type = OverrideType.FORCE_ADD
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)
