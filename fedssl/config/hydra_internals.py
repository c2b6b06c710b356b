"""Undocumented names of Hydra 1.3: parsing the command line, and parsing, expanding and applying overrides."""

import copy
import functools
import itertools
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from hydra import initialize_config_dir, version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, OverrideType
from hydra.types import TaskFunction
from hydra.version import VersionBase
from omegaconf import DictConfig

from fedssl.errors import InputError

__all__ = ["ChoiceSweep", "Glob", "IntervalSweep", "Override"]


@contextmanager
def initialized_hydra(config_dir: str) -> Iterator[None]:
    """Initialize Hydra in a block, and restore what the user's program has initialized."""
    of_user, base = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=config_dir):
            yield
    finally:
        GlobalHydra.instance().hydra = of_user
        VersionBase.instance().version_base = base


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
    """Return the flags with their values, and the overrides, in any order; raise `InputError` for unusable flags."""
    parser = _args_parser()

    def raise_error(message: str) -> NoReturn:
        raise InputError(f"{message}; settings have no dashes: rounds=5; `fedssl --hydra-help` lists all flags")

    parser.error = raise_error  # type: ignore[method-assign]  # it exits, and has no hook
    namespace = parser.parse_intermixed_args(list(arguments))
    if namespace.experimental_rerun is not None:
        raise InputError(
            "--experimental-rerun loads a pickle, which can run code; see `command` in the run's summary.json"
        )
    if namespace.config_name is not None or namespace.config_path is not None:
        raise InputError(
            "--config-name and --config-path are not supported; save the settings in experiment/NAME.yaml of a folder "
            "and add --config-dir FOLDER experiment=NAME"
        )
    if namespace.shell_completion:
        raise InputError("--shell-completion is not supported; `fedssl --help` lists groups, choices and settings")
    actions = [name for name in ("help", "hydra_help", "cfg", "info", "run", "multirun") if getattr(namespace, name)]
    if len(actions) > 1:
        one, other, *_ = (f"--{name.replace('_', '-')}" for name in actions)
        raise InputError(f"{one} and {other} exclude each other; remove one of them")
    if (namespace.package or namespace.resolve) and not namespace.cfg:
        raise InputError("--package and --resolve belong to --cfg; add --cfg job, or remove them")
    overrides: list[str] = namespace.overrides
    flags = [argument for argument in arguments if argument not in ("--run", "-r")]  # which is the default
    for override in overrides:
        flags.remove(override)
    return flags, overrides


def run_main(job: TaskFunction, folder: Path) -> None:
    """Run ``job`` by the flags and overrides in ``sys.argv``, as `hydra.main` does with ``folder / "config.yaml"``."""
    version.setbase("1.3")
    parser = _args_parser()
    _run_hydra(parser.parse_args(), parser, job, config_path=str(folder), config_name="config")


def _args_parser() -> ArgumentParser:
    """Return Hydra's parser. One of its help texts is not a string, which `argparse` rejects from Python 3.14 on."""
    with patch.object(ArgumentParser, "_check_help", lambda *_: None, create=True):
        parser = get_args_parser()
    for action in parser._actions:
        if action.help is not None and not isinstance(action.help, str):
            action.help = "Install or uninstall shell completion"
    return parser


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Set the values of ``overrides`` in a composed config; settings in the items of a list may be new."""
    for override in overrides:
        if any(part.isdecimal() for part in override.key_or_group.split(".")):
            override.type = OverrideType.FORCE_ADD
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)
