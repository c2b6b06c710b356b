"""Tasks that a server proposes to an edge client: names of choices and plain values, as JSON.

The edge client composes its settings from its own ``conf/`` with these choices, and then sets the values. A task
selects installed classes and numbers, never code. Settings of the machine and its images are not part of a task.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.config.compose import compose_config
from fedssl.config.overrides import check_run_id, config_groups, did_you_mean
from fedssl.config.settings import SERVER_ENCODER_KEYS, ClientSettings, Settings, check_channels
from fedssl.config.targets import add_import_path, check_targets, search_folders, searchpath_override
from fedssl.config.typed_settings import client_settings, training_components
from fedssl.config.validation import check_types, validate_config
from fedssl.errors import InputError, RequestRefused
from fedssl.plain_values import flatten, plain_values

GROUPS = ("augmentation", "encoder", "tuning", "method", "regularizer", "schedule", "optimizer", "strategy")
ALLOWED_KEYS = ("run_id", "seed", "rounds", "local_epochs", "batch_size", "clip_norm", "precision", "channels_last")
# What a model needs.
_DATA_KEYS = ("channels", "size", "mean", "std", "background", "window", "percentiles", "dtype")
DATA_KEYS = tuple(f"dataset.{key}" for key in _DATA_KEYS)
MAPPING_KEYS = ("method.teacher_encoder",)  # settings whose value is a mapping with any keys
REQUIRED_KEYS = ("run_id", "seed", "rounds", "dataset.size")

_SERVER_KEYS = {"strategy.reported_metrics", "strategy.file", *(f"encoder.{key}" for key in SERVER_ENCODER_KEYS)}

MAX_TEXT_LENGTH, MAX_LIST_LENGTH, MAX_WORD_LENGTH, MAX_DEPTH = 65_536, 4096, 64, 4
# Largest integers by the last part of a key.
MAX_VALUES = {"cache_bytes": 2**40, "depth": 256, "window": 2**32, "num_layers": 256, "rounds": 10**6}
MAX_VALUES |= {"seed": 2**63 - 1}
MAX_OTHER_VALUE = 2**16


@dataclass(frozen=True)
class DeviceTask:
    """The choice in each of `GROUPS`, and plain values by dotted key."""

    choices: Mapping[str, str]
    values: Mapping[str, Any]

    def text(self) -> str:
        """Return the task as JSON."""
        return json.dumps({"choices": self.choices, "values": self.values}, sort_keys=True)


def make_task(settings: Settings) -> DeviceTask:
    """Return the task of a run for edge clients; `InputError` if a setting cannot be part of a task."""
    config = settings.recording.config
    values = {key: value for key, value in flatten(config) if _is_allowed_key(key)}
    for key in MAPPING_KEYS:
        if (node := OmegaConf.select(config, key)) is not None:
            values = {name: value for name, value in values.items() if not name.startswith(f"{key}.")}
            values[key] = OmegaConf.to_container(node)
    task = DeviceTask({group: settings.recording.choices[group] for group in GROUPS}, values)
    try:
        composed = compose_task(task.text(), search_folders(settings.recording.overrides))
    except RequestRefused as error:
        raise InputError(f"edge clients would reject this run: {error}") from error
    if training_components(composed) != training_components(config):
        raise InputError(
            "edge clients accept choices and plain values only, but a _target_ was changed or a node deleted; move "
            "these settings to a file of a config directory that edge clients have, too (--config-dir)"
        )
    return task


def read_task(text: str, *, states: Path, folders: Sequence[Path] = ()) -> ClientSettings:
    """Return the client settings of a task, without those of the machine and its images.

    ``states`` is the folder of the client states of all runs. Otherwise as `compose_task`, with an `InputError` if a
    class in the edge client's config directory cannot be imported.
    """
    config = compose_task(text, folders)
    add_import_path(folders)
    check_targets(config)
    return client_settings(config, states=states / config.run_id, partition=None)


def compose_task(text: str, folders: Sequence[Path] = ()) -> DictConfig:
    """Compose the config of a task, with the edge client's own config ``folders``; refuse an invalid task."""
    task = _read(text)
    _check_choices(task.choices, config_groups(folders))
    overrides = [*([searchpath_override(folders)] if folders else []), "dataset=folder"]
    config, _ = compose_config([*overrides, *(f"{group}={task.choices[group]}" for group in GROUPS)])
    defaults = {key: value for key, value in flatten(config) if _is_allowed_key(key)}
    for key, value in task.values.items():
        if key not in defaults:
            raise RequestRefused(f"there is no setting {key!r} that a server may set{did_you_mean(key, defaults)}")
        try:
            plain = plain_values(value, key)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        check_limits(key, plain)
        OmegaConf.update(config, key, plain, merge=False)
    missing = [key for key in REQUIRED_KEYS if key not in task.values]
    if missing:
        raise RequestRefused(f"the task lacks {missing[0]}")
    try:
        check_run_id(config.run_id)
        check_types(config, defaults)
        validate_config(config)
        check_channels(config.dataset)
    except InputError as error:
        raise RequestRefused(str(error)) from error
    return config


def check_limits(key: str, value: Any, *, depth: int = 0) -> None:
    """Raise `RequestRefused` unless plain values are of limited size."""
    inner: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        inner = value
        invalid = [name for name in inner if not name.isidentifier()]
        if invalid:
            raise RequestRefused(f"{key} has the key {invalid[0]!r}, which is not a valid setting name")
    elif isinstance(value, list):
        inner = {str(index): item for index, item in enumerate(value)}
    else:
        _check_single(key, value)
    if len(inner) > MAX_LIST_LENGTH or depth > MAX_DEPTH:
        raise RequestRefused(f"{key} is longer than {MAX_LIST_LENGTH} values, or nested more than {MAX_DEPTH} deep")
    for name, item in inner.items():
        check_limits(f"{key}.{name}", item, depth=depth + 1)


def _check_single(key: str, value: Any) -> None:
    if isinstance(value, str):
        if len(value) > MAX_WORD_LENGTH or not value.isprintable():
            raise RequestRefused(f"{key} is not a plain string of at most {MAX_WORD_LENGTH} characters")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RequestRefused(f"{key} is {value}, which is not finite")
    elif isinstance(value, int):  # booleans, too
        largest = MAX_VALUES.get(key.rpartition(".")[2], MAX_OTHER_VALUE)
        if abs(value) > largest:
            raise RequestRefused(f"{key} is beyond {largest}, its largest integer")


def _is_allowed_key(key: str) -> bool:
    first, *others = key.split(".")
    if any(part.startswith("_") for part in others) or key in _SERVER_KEYS:
        return False
    return (first in GROUPS and bool(others)) or key in ALLOWED_KEYS or key in DATA_KEYS


def _read(text: str) -> DeviceTask:
    if len(text) > MAX_TEXT_LENGTH:
        raise RequestRefused(f"the task is longer than {MAX_TEXT_LENGTH} characters")
    try:
        task = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestRefused("the task is not JSON; an edge client accepts choices and plain values only") from error
    if not isinstance(task, dict) or task.keys() != {"choices", "values"}:
        raise RequestRefused("the task must have the keys choices and values")
    if not all(isinstance(part, dict) for part in task.values()):
        raise RequestRefused("the task's choices and values must each be a mapping")
    return DeviceTask(**task)


def _check_choices(choices: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> None:
    if choices.keys() != set(GROUPS):
        raise RequestRefused(f"the task must choose in {', '.join(GROUPS)}, and in nothing else")
    for group, name in choices.items():
        if name not in known[group]:
            raise RequestRefused(
                f"{group}={name} is not a choice of this edge client{did_you_mean(str(name), known[group])}"
            )
