"""A task: what a server may ask of a device, in names of choices and plain values.

The device composes its settings from its own ``conf/`` with these choices, and then sets the values: a task says which
of the device's classes are used and with which numbers, never which code. What is about the machine and its images
is in no task. It travels as JSON.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.config.compose import check_type, compose_config, flatten, validate_config
from fedssl.config.load import client_settings, read_data, training_components
from fedssl.config.overrides import check_run_id, config_groups, did_you_mean
from fedssl.config.settings import ClientSettings, Settings
from fedssl.config.targets import add_import_path, check_targets, search_folders, searchpath_override
from fedssl.datasets.base import check as check_images
from fedssl.errors import InputError, RequestRefused

GROUPS = ("augmentation", "encoder", "method", "regularizer", "schedule", "optimizer", "strategy")
ALLOWED_KEYS = ("run_id", "seed", "rounds", "local_epochs", "batch_size", "clip_norm", "precision", "channels_last")
DATA_KEYS = tuple(f"dataset.{key}" for key in ("channels", "size", "mean", "std"))  # what a model must know of them
REQUIRED_KEYS = ("run_id", "seed", "rounds", "dataset.size")

MAX_TEXT_LENGTH, MAX_LIST_LENGTH, MAX_WORD_LENGTH, MAX_DEPTH = 65_536, 4096, 64, 4
# Largest whole numbers by the last part of a key: what costs time before its memory can be told, and what may be more.
MAX_VALUES = {"depth": 256, "num_layers": 256, "rounds": 10**6, "seed": 2**63 - 1}
MAX_OTHER_VALUE = 2**16


@dataclass(frozen=True)
class DeviceTask:
    """Names and plain values.

    Attributes
    ----------
    choices : mapping of str to str
        The choice in each of `GROUPS`.
    values : mapping
        Values by dotted key: numbers, true, false, null, words, and lists and mappings of these.
    """

    choices: Mapping[str, str]
    values: Mapping[str, Any]

    def text(self) -> str:
        """The task as it travels."""
        return json.dumps({"choices": self.choices, "values": self.values}, sort_keys=True)


def make_task(settings: Settings) -> DeviceTask:
    """The task of a run, for devices.

    Raises
    ------
    InputError
        The run has what no task can say, such as a setting that is in no file of ``conf/``.
    """
    config = OmegaConf.create(settings.recording.resolved_yaml)
    assert isinstance(config, DictConfig)
    values = {key: value for key, value in flatten(config) if _is_allowed_key(key)}
    task = DeviceTask({group: settings.recording.choices[group] for group in GROUPS}, values)
    own = search_folders(settings.recording.overrides)
    try:
        composed = compose_task(task.text(), own)
    except RequestRefused as error:
        raise InputError(f"devices would refuse this run: {error}") from error
    if training_components(composed) != training_components(config):
        raise InputError(
            "devices take choices and plain values only, which do not give these settings: a _target_ was changed or a "
            "part taken away; put such settings into a file of a folder that devices have as well (--config-dir)"
        )
    return task


def read_task(text: str, *, states: Path, folders: Sequence[Path] = ()) -> ClientSettings:
    """What a device makes of a task; what is about its machine and its images is left to it.

    Parameters
    ----------
    text, folders
        As for `compose_task`.
    states : Path
        The folder below which the device keeps what it keeps of every run.

    Raises
    ------
    Refused
        As `compose_task` does.
    InputError
        A class of the device's own cannot be imported.
    """
    config = compose_task(text, folders)
    if folders:
        add_import_path([searchpath_override(folders)])
    check_targets(config)
    return client_settings(config, states=states / config.run_id, partition=None)


def compose_task(text: str, folders: Sequence[Path] = ()) -> DictConfig:
    """The device's own settings, with the choices and values of a task.

    Parameters
    ----------
    text : str
        As `DeviceTask.text` gives it.
    folders : sequence of Path
        Of the device's own settings beside ``conf/``.

    Raises
    ------
    Refused
        It is no task, or names what is not there or has another type.
    """
    task = _read(text)
    _check_choices(task.choices, config_groups(folders))
    overrides = [*([searchpath_override(folders)] if folders else []), "dataset=image_folder"]
    config, _ = compose_config([*overrides, *(f"{group}={task.choices[group]}" for group in GROUPS)])
    defaults = {key: value for key, value in flatten(config) if _is_allowed_key(key)}
    for key, value in task.values.items():
        if key not in defaults:
            raise RequestRefused(f"there is no setting {key!r} that a server may set{did_you_mean(key, defaults)}")
        check_plain(key, value)
        try:
            check_type(key, value, defaults[key])
        except InputError as error:
            raise RequestRefused(str(error)) from error
        OmegaConf.update(config, key, value, merge=False)
    missing = [key for key in REQUIRED_KEYS if key not in task.values]
    if missing:
        raise RequestRefused(f"the task does not say {missing[0]}")
    _check_ranges(config)
    return config


def check_plain(key: str, value: Any, *, depth: int = 0) -> None:
    """Refuse what is no plain value, or a very large one; raises `RequestRefused`."""
    inner: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        inner = value
        odd = [name for name in inner if name.startswith("_") or not name.isidentifier()]
        if odd:
            raise RequestRefused(f"{key} has the key {odd[0]!r}, which is no name of a setting")
    elif isinstance(value, list):
        inner = {str(number): one for number, one in enumerate(value)}
    else:
        _check_single(key, value)
    if len(inner) > MAX_LIST_LENGTH or depth > MAX_DEPTH:
        raise RequestRefused(f"{key} is longer than {MAX_LIST_LENGTH} values, or nested more than {MAX_DEPTH} deep")
    for name, one in inner.items():
        check_plain(f"{key}.{name}", one, depth=depth + 1)


def _check_single(key: str, value: Any) -> None:
    if isinstance(value, str):
        if len(value) > MAX_WORD_LENGTH or not value.isprintable() or "${" in value or value == "???":
            raise RequestRefused(f"{key} is not a plain word of at most {MAX_WORD_LENGTH} characters")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RequestRefused(f"{key} is {value}, which is no number")
    elif isinstance(value, int):  # true and false too
        largest = MAX_VALUES.get(key.rpartition(".")[2], MAX_OTHER_VALUE)
        if abs(value) > largest:
            raise RequestRefused(f"{key} is beyond {largest}, the largest whole number that it may be")


def _is_allowed_key(key: str) -> bool:
    """Whether a task may have this key."""
    first, *others = key.split(".")
    if any(part.startswith("_") for part in others) or key in ("strategy.reported_metrics", "strategy.file"):
        return False
    return (first in GROUPS and bool(others)) or key in ALLOWED_KEYS or key in DATA_KEYS


def _read(text: str) -> DeviceTask:
    if len(text) > MAX_TEXT_LENGTH:
        raise RequestRefused(f"the task is longer than {MAX_TEXT_LENGTH} characters")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(
            "the task is no JSON; a device takes choices and plain values, and no settings in full"
        ) from error
    if not isinstance(found, dict) or found.keys() != {"choices", "values"}:
        raise RequestRefused("the task is not of choices and values")
    if not all(isinstance(part, dict) for part in found.values()):
        raise RequestRefused("the task's choices and values must each be a mapping")
    return DeviceTask(found["choices"], found["values"])


def _check_choices(choices: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> None:
    if choices.keys() != set(GROUPS):
        raise RequestRefused(f"the task must choose in {', '.join(GROUPS)}, and in nothing else")
    for group, name in choices.items():
        if name not in known[group]:
            raise RequestRefused(f"{group}={name} is no choice of this device{did_you_mean(str(name), known[group])}")


def _check_ranges(config: DictConfig) -> None:
    numbers = [*config.dataset.mean, *config.dataset.std]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers):
        raise RequestRefused("dataset.mean and dataset.std must be lists of numbers")
    try:
        check_run_id(config.run_id)
        validate_config(config)
        check_images(read_data(config.dataset))
    except InputError as error:
        raise RequestRefused(str(error)) from error
