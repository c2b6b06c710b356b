"""Axes of a sweep: one factor at a time around the swept combinations.

An experiment such as ``conf/experiment/review.yaml`` sets ``sweep.axes``: for each name a list of texts with overrides.
Every text is added to the sweep by itself and replaces overrides of the same keys and groups, so that it may also fix
or sweep other values, such as a strategy with its own parameter. Swept values of the experiment itself are in
``hydra.sweeper.params``, where Hydra's sweeper reads them too; overrides on the command line replace them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from fedssl.config.compose import compose_unresolved, hydra_value, validate_names
from fedssl.config.hydra_internals import expand_sweep
from fedssl.config.literal import literal_values
from fedssl.config.overrides import config_groups, key_and_group, parse, split_words
from fedssl.config.targets import SEARCHPATH_KEY, search_folders
from fedssl.errors import InputError

OPTIONS = {"axes", "without"}


def with_experiment_values(overrides: Sequence[str]) -> list[str]:
    """Add the values that the experiment sweeps, apart from keys and groups with an override."""
    params = hydra_value(overrides, "sweeper.params") if _chosen(overrides) else None
    swept = literal_values([f"{key}={value}" for key, value in (params or {}).items()], sweep=True)
    return [*not_in(swept, overrides), *overrides]


def expand_axes(overrides: Sequence[str], options: Mapping[str, Any]) -> list[list[str]]:
    """Return the overrides of every job: first those without an axis, then those of each value of each axis."""
    groups = config_groups(search_folders(overrides))
    jobs = expand_sweep(overrides, groups)
    axes = axes_of(overrides, options)
    without = options.get("without", [])
    unknown = [name for name in without if name not in axes]
    if unknown:
        known = f"choose from {', '.join(axes)}" if axes else "this sweep has none, see experiment=review"
        raise InputError(f"sweep.without=[{unknown[0]}] names no axis; {known}")
    for name, texts in axes.items():
        for text in texts if name not in without else ():
            jobs += expand_sweep(_with_value(overrides, name, text), groups)
    return jobs


def possible_values(overrides: Sequence[str], options: Mapping[str, Any]) -> set[str]:
    """Return all that the overrides of a job can be: values of these overrides, and of their axes."""
    words = [*overrides]
    for name, texts in axes_of(overrides, options).items():
        words += [word for text in texts for word in _words_of_axis(name, text)]
    groups = config_groups(search_folders(overrides))
    return {value for word in words for values in expand_sweep([word], groups) for value in values}


def axes_of(overrides: Sequence[str], options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the axes of the experiment, which those of ``options`` replace; raise `InputError` if one is no list."""
    chosen = _chosen(overrides)
    sweep: Any = OmegaConf.to_container(compose_unresolved(chosen)[0].sweep) if chosen else {}
    merged = {**(sweep.get("axes") or {}), **(options.get("axes") or {})}
    axes = {name: texts for name, texts in merged.items() if texts is not None}
    for name, texts in axes.items():
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise InputError(
                f"sweep.axes has no list of overrides for {name}; write e.g. "
                f'\'sweep.axes={{{name}:["partition=iid","num_clients=5"]}}\''
            )
    return axes


def _words_of_axis(name: str, text: str) -> list[str]:
    words = literal_values(split_words(f"sweep.axes.{name}", text), sweep=True)
    if not words or any("=" not in word for word in words):
        raise InputError(f"sweep.axes.{name} has {text!r}, which is not KEY=VALUE ...; correct it")
    return words


def _with_value(overrides: Sequence[str], name: str, text: str) -> list[str]:
    own = _words_of_axis(name, text)
    combined = [*not_in(overrides, own), *own]
    try:
        validate_names(combined)
    except InputError as error:
        raise InputError(f"sweep.axes.{name}: {error}") from error
    return combined


def not_in(overrides: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the overrides whose key and group no other one sets: a choice replaces the settings of its group."""
    exact = {override.partition("=")[0].lstrip("+") for override in others}
    return [override for override in overrides if not key_and_group(override.lstrip("+")) & exact]


def _chosen(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that select an experiment, unless several are swept; empty without one."""
    single = [override for override in parse(overrides) if not override.is_sweep_override()]
    experiment = [str(each.input_line) for each in single if each.key_or_group == "experiment"]
    folders = [str(each.input_line) for each in single if each.key_or_group == SEARCHPATH_KEY]
    return [*folders, *experiment] if experiment else []
