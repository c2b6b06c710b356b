"""Composition of the config from ``conf/`` and the user's config directories by Hydra, and its validation.

`fedssl.config.load` converts the config to typed settings for the rest of the code.
"""

import functools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedssl.config.constraint_table import CONSTRAINTS
from fedssl.config.constraints import group_of
from fedssl.config.hydra_internals import ChoiceSweep, Override, apply_overrides, initialized_hydra
from fedssl.config.literal import absolute_setting
from fedssl.config.overrides import CONF, check_choices, choices_with, config_groups, parse, suggest_setting
from fedssl.config.settings import DROPOUT_KEYS, statistic_of_channels
from fedssl.config.statistics_settings import request_statistics
from fedssl.config.targets import SEARCHPATH_KEY, add_import_path, check_targets, normalize, search_folders
from fedssl.config.validation import check_types, validate_config
from fedssl.errors import InputError
from fedssl.machine.process import default_threads
from fedssl.plain_values import flatten, plain_config, plain_values

# Settings and groups that a resumed run may change. They do not change results, except `RESULT_KEYS`.
RESUMABLE_KEYS = {
    *("rounds", "engine", "tracker", "device", "threads", "keep_freed_memory", "reply_timeout"),
    *("evaluate_every", "early_stopping", "final_evaluation", "collapse_images", "measure_resources"),
    *("evaluate_personalized", "adaptation_epochs"),
    *("checkpoint_every", "keep_checkpoints", "pause_after", "snapshot_every"),
    *("dataset.cache", "dataset.storage", "calibration.dataset.cache", "calibration.dataset.storage"),
    *DROPOUT_KEYS,
}
RESULT_KEYS = {
    *("rounds", "early_stopping", "aggregation.round_deadline"),
    *("final_evaluation", "collapse_images", "adaptation_epochs"),
}


def resolve_config(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the validated config without interpolations, and the choice of every group."""
    overrides = normalize(overrides)
    defaults = validate_names(overrides)
    if several := [override for override in parse(overrides) if override.is_sweep_override()]:
        raise InputError(
            f"{several[0].input_line} has several values; set one, or a list as {several[0].key_or_group}=[...], "
            "or add -m to the command fedssl, which runs a job for each"
        )
    config, choices = compose_config(overrides)
    _check_used(config, overrides)
    _check_choices(config, choices)
    check_types(config, defaults)
    validate_config(config)
    add_import_path(search_folders(overrides))
    check_targets(plain_config(config))
    if config.plan:
        raise InputError("plan=true is for the command fedssl, which then runs nothing; leave it out here")
    with open_dict(config):
        del config["sweep"], config["plan"]  # options of the command
    config.threads = config.threads or default_threads(config.dataset.size)
    if config.encoder.get("weights") is not None:
        from fedssl.pretrained.sources import absolute_source  # here: slow import

        config.encoder.weights = absolute_source(str(config.encoder.weights))
    _make_absolute(config)
    _describe_teacher(config)
    return config, choices


def _check_used(config: DictConfig, overrides: Sequence[str]) -> None:
    """Raise `InputError` for a setting that neither ``conf/`` has nor an interpolation uses."""
    if "experiment" in config:
        raise InputError(
            "the file of experiment=NAME sets nothing; let it begin with the line # @package _global_, and "
            "save it without a byte order mark"
        )
    known = {key.partition(".")[0] for key in _defaults(())[0]} | config_groups(search_folders(overrides)).keys()
    for key in map(str, config.keys() - known):
        if f"${{{key}" not in OmegaConf.to_yaml(compose_unresolved(overrides)[0]):
            raise InputError(f"there is no setting {key!r}{suggest_setting(key, known)}; `fedssl --cfg job` shows all")


def _check_choices(config: DictConfig, choices: Mapping[str, str]) -> None:
    """Raise `InputError` for a choice without a class, in a group whose choices have one."""
    for key in _defaults(())[0]:
        group, _, name = key.partition(".")
        if name == "_target_" and name not in config[group]:
            raise InputError(
                f"{group}={choices[group]} has no _target_; add a line with the dotted name of its class to its file, "
                "such as _target_: package.module.Class"
            )


def _make_absolute(config: DictConfig) -> None:
    """Make paths absolute, because clients and resumed runs have another working directory."""
    for key, value in list(flatten(config)):
        path = absolute_setting(key, value)
        if path is not None and not value:
            raise InputError(f"{key} is empty; set a path, or null")
        if path is not None:
            OmegaConf.update(config, key, path)


def _describe_teacher(config: DictConfig) -> None:
    """Set the architecture of the teacher, which clients build, from its file, which only the server reads.

    A file that does not exist here may exist where the run starts, which checks it.
    """
    if "teacher_encoder" in config.method and config.teacher is not None and Path(config.teacher).exists():
        from fedssl.export import describe_encoder  # here: it needs torch

        config.method.teacher_encoder = describe_encoder(config.teacher)


def validate_names(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Reject unknown keys and choices in overrides and sweeps; return the default of every setting by dotted key."""
    overrides = normalize(overrides)
    parsed = parse(overrides)
    known_groups = config_groups(search_folders(overrides))
    chosen = [override for override in overrides if override.startswith(f"{SEARCHPATH_KEY}=")]
    for override in parsed:
        group = override.key_or_group.split("@")[0]
        if group in known_groups:
            is_added = override.package is None and (override.is_add() or override.is_force_add())
            if is_added and group in config_groups():
                raise InputError(f"{override.input_line} is selected already; write it without +")
            check_choices(override, group=group, choices=known_groups[group])
            if not override.is_sweep_override():
                chosen.append(str(override.input_line))
            elif group == "experiment" and isinstance(several := override.value(), ChoiceSweep):
                chosen.append(f"experiment={several.list[0]}")  # the first one defines the valid keys
    fixed = not _is_changeable(chosen)
    defaults, known = _defaults(tuple(chosen)) if fixed else _defaults.__wrapped__(tuple(chosen))
    swept = [o.key_or_group for o in parsed if o.is_sweep_override() and o.key_or_group in known_groups]
    for override in parsed:
        key = override.key_or_group
        if override.is_delete() and not key.startswith(("evaluation.", "final_evaluation.")):
            raise InputError(f"~{key} deletes a required setting; set it to another value instead")
        open_key = override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra")
        below_swept = any(key.startswith(f"{group}.") for group in swept)
        if key.split("@")[0] not in known_groups and key not in known and not (open_key or below_swept):
            hint = choices_with(key) or suggest_setting(key, known)
            raise InputError(f"there is no setting {key!r}{hint}; `fedssl --cfg job` shows all")
    return defaults


@functools.lru_cache(maxsize=256)
def _defaults(chosen: tuple[str, ...]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the default of every setting by its dotted key, and all keys, including those of groups."""
    config, _ = compose_config(chosen)
    values = dict(flatten(config))
    nodes = [key for key, _ in flatten(config, inner=True)]
    return values, [*nodes, *(item for key in values for item in _item_settings(key, values[key]))]


def _item_settings(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of all settings of the mappings in a list, also of those that are omitted."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            nodes = [key, *(f"{key}.{name}" for name in item if isinstance(item[name], dict))]
            for node in nodes:
                yield from (f"{key}.{index}{node.removeprefix(key)}.{name}" for name in CONSTRAINTS[group_of(node)])


def compose_config(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the resolved config, and the choice of every group."""
    config, choices = compose_unresolved(overrides)
    explicit = {override.key_or_group for override in parse(overrides)}
    request_statistics(config, explicit=explicit)
    for key, values in _statistics(OmegaConf.to_container(config)):
        if key not in explicit or len(OmegaConf.select(config, key)) == 1:
            OmegaConf.update(config, key, values)
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        override = next((override for override in overrides if "${" in override), "a setting")
        raise InputError(f"{override} cannot be resolved: {' '.join(str(error).split())}") from error
    if _is_changeable(overrides):
        check_resolved(config)
    return config, choices


def check_resolved(config: DictConfig) -> None:
    """Raise `InputError` if text in a resolved config has an interpolation, which OmegaConf would resolve later."""
    try:
        plain_values(OmegaConf.to_container(config, resolve=False), "settings", special=None)
    except ValueError as error:
        raise InputError(f"{error}; set another value, or rename the folder whose name has it") from error


def _statistics(node: Any, prefix: str = "") -> Iterator[tuple[str, list[float]]]:
    """Yield mean and standard deviation of each data set whose value is for another number of channels."""
    if not isinstance(node, dict):
        return
    channels = node.get("channels")
    for name, value in node.items():
        if name in ("mean", "std") and isinstance(value, list) and isinstance(channels, int) and value:
            if len(value) != channels and all(isinstance(number, int | float) for number in value):
                yield f"{prefix}{name}", list(statistic_of_channels(value, channels))
        else:
            yield from _statistics(value, f"{prefix}{name}.")


def compose_unresolved(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the config with interpolations, and the choice of every group.

    Hydra composes the chosen files, which is slow, and then sets the values. The composition is cached by its choices.
    """
    folders = search_folders(overrides)
    chosen: list[Override] = []
    values: list[Override] = []
    for override in parse(overrides):
        (chosen if _chooses(override, folders) else values).append(override)
    lines = tuple(str(override.input_line) for override in chosen)
    try:
        config, choices = _composition(lines)
        apply_overrides(values, config)
    except UnicodeDecodeError as error:
        raise InputError(f"a file of --config-dir is not UTF-8 ({error}); save it as UTF-8") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise InputError(" ".join(str(error).split())) from error
    names = config_groups(folders)
    return config, {group: name for group, name in choices.items() if group in names}


def _is_changeable(overrides: Sequence[str]) -> bool:
    """Return whether a composition depends on more than ``conf/``: on resolvers or the user's config directories."""
    return bool(search_folders(overrides)) or any("${" in override for override in overrides)


def _chooses(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether Hydra itself applies or rejects an override, instead of `apply_overrides`."""
    key = override.key_or_group
    if override.package is not None or override.is_sweep_override() or key.startswith("hydra"):
        return True
    return any((root / key).is_dir() for root in (CONF, *folders)) and not isinstance(override.value(), dict)


def _composition(overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    """Return the config with interpolations, and the choices, from the cache if they depend on ``conf/`` alone."""
    if _is_changeable(overrides):
        return _hydra_composed(overrides)
    in_order = tuple(sorted(overrides, key=lambda override: override.partition("=")[0]))  # the last of a group stays it
    config, choices = pickle.loads(_composed(in_order))
    return config, choices


@functools.lru_cache(maxsize=1024)
def _composed(overrides: tuple[str, ...]) -> bytes:
    """Return the config with interpolations and the choices, pickled, because unpickling is the fastest copy.

    Hydra needs 0.4 s. A choice that sets nothing outside its group only replaces the node of the group, without Hydra,
    if the replaced choice has set nothing outside either.
    """
    names = dict(override.partition("=")[::2] for override in overrides)  # of a group's choices, the last one
    simple = "experiment" not in names and names.keys() <= config_groups().keys()
    local = {group: node for group, name in names.items() if simple and (node := _local_choice(group, name))}
    while local:
        others = tuple(sorted(f"{group}={name}" for group, name in names.items() if group not in local))
        config, choices = pickle.loads(_composed(others))
        replaceable = {group: node for group, node in local.items() if _local_choice(group, choices[group])}
        if len(replaceable) == len(local):
            with open_dict(config):
                for group, node in local.items():
                    config[group], choices[group] = pickle.loads(node), names[group]
            return pickle.dumps((config, choices))
        local = replaceable
    return pickle.dumps(_hydra_composed(overrides))


@functools.lru_cache(maxsize=1024)
def _local_choice(group: str, name: str) -> bytes | None:
    """Return the pickled content of a choice's file, or None if it selects other choices or sets other groups."""
    if name not in config_groups().get(group, ()):
        return None
    file = CONF / group / f"{name}.yaml"
    return None if re.search("^(defaults:|# @package)", file.read_text(), re.M) else pickle.dumps(OmegaConf.load(file))


def _hydra_composed(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    with initialized_hydra(str(CONF)):
        config = hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
    choices = {str(group): str(name) for group, name in config.hydra.runtime.choices.items() if name}
    with open_dict(config):
        del config["hydra"]
        own = [override for override in overrides if not override.startswith("experiment=")]
        replaced = {override.partition("=")[0] for override in own} & choices.keys() & config.keys()
        if replaced and len(own) < len(overrides):
            alone, _ = _composition(tuple(own))
            for group in replaced:
                _keep_settings_of(alone[group], config[group])
    return config, choices


def _keep_settings_of(choice: DictConfig, node: DictConfig) -> None:
    """Drop what an experiment sets for its own choice of a group and the chosen one does not have."""
    for name in list(node):
        if name not in choice:
            del node[name]
        elif isinstance(choice[name], DictConfig) and choice[name] and isinstance(node[name], DictConfig):
            _keep_settings_of(choice[name], node[name])


def hydra_value(overrides: Sequence[str], key: str) -> Any:
    """Return a setting of Hydra itself, e.g. ``sweep.dir``; only its own overrides and a single experiment matter."""
    single = [override for override in parse(overrides) if not override.is_sweep_override()]
    experiments = [str(override.input_line) for override in single if override.key_or_group == "experiment"]
    chosen = [*experiments, *(override for override in overrides if override.startswith("hydra"))]
    try:
        with initialized_hydra(str(CONF)):
            return OmegaConf.select(hydra_compose("config", overrides=chosen, return_hydra_config=True).hydra, key)
    except MissingConfigException as error:
        plugin = next((o for o in chosen if o.startswith(("hydra/launcher=", "hydra/sweeper="))), "a plugin of Hydra")
        kind, _, name = plugin.removeprefix("hydra/").partition("=")
        raise InputError(f"{plugin} is not installed; install its package, e.g. hydra-{name}-{kind}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(" ".join(str(error).split())) from error
