"""Composition of the config from ``conf/`` and the user's config directories by Hydra, and its validation.

`fedssl.config.load` converts the config to typed settings for the rest of the code.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedssl.config.compat import ChoiceSweep, Override, apply_overrides
from fedssl.config.overrides import CONF, check_choices, config_groups, did_you_mean, parse
from fedssl.config.renamed import check_renamed
from fedssl.config.settings import WIRE_DTYPES
from fedssl.config.targets import SEARCHPATH_KEY, add_import_path, check_targets, normalize_searchpath, search_folders
from fedssl.errors import InputError
from fedssl.machine.process import default_threads

MINIMUM = {
    "seed": 0,
    "num_clients": 1,
    "clients_per_round": 1,
    "rounds": 1,
    "local_epochs": 0,
    "batch_size": 2,
    "reply_timeout": 1,
    "evaluate_every": 0,
    "collapse_images": 0,
    "unseen_clients": 0,
    "adaptation_epochs": 0,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "snapshot_every": 0,
}
MAX_THREADS = 1024  # more threads crash the process
# Groups that are off by default: a key that ``none`` also has, the choice that uses it, and a key only of that choice.
_GROUP_REQUIREMENTS = {
    "calibration": ("when", "auxiliary", "share"),
    "privacy": ("clip_norm", "central", "noise_multiplier"),
    "secure_aggregation": ("clipping_range", "secagg_plus", "threshold"),
}
CHOICES = {"device": ("auto", "cpu", "cuda"), "precision": ("fp32", "bf16"), "wire_dtype": WIRE_DTYPES}

# Settings and groups that do not change results, and the number of rounds. A resumed run may change them.
RESUMABLE_KEYS = {
    *("rounds", "engine", "tracker", "device", "threads", "keep_freed_memory", "reply_timeout"),
    *("evaluate_every", "early_stopping", "final_evaluation", "collapse_images", "measure_resources"),
    *("evaluate_personalized", "adaptation_epochs"),
    *("checkpoint_every", "keep_checkpoints", "snapshot_every", "dataset.cache", "calibration.dataset.cache"),
}


def resolve_config(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the validated config without interpolations, and the choice of every group."""
    overrides = normalize_searchpath(overrides)
    defaults = validate_names(overrides)
    config, choices = compose_config(overrides)
    for key in config:  # the user's files may contain unknown keys
        check_renamed(str(key))
    if "metrics" in config.strategy:
        check_renamed("strategy.metrics")
    values = dict(flatten(config))
    for key, default in flatten(defaults):
        if key in values:  # an override may delete a key: ~key
            check_type(key, values[key], default)
    validate_config(config)
    add_import_path(overrides)
    check_targets(config)
    config.threads = config.threads or default_threads(config.dataset.size)
    if config.output_dir is not None:
        config.output_dir = str(config.output_dir)
    for node, key in ((config.partition, "encoder"), (config.partition, "file"), (config.strategy, "file")):
        _make_absolute(node, key)
    _make_absolute(config, "teacher")
    for node in (config.dataset, config.calibration.get("dataset")):
        if node is not None:
            _make_absolute(node, "path")
            if node.get("cache") != "auto":
                _make_absolute(node, "cache")
    return config, choices


def _make_absolute(node: DictConfig, key: str) -> None:
    """Make a path absolute, because clients and resumed runs have another working directory."""
    if node.get(key) not in (None, ""):
        node[key] = str(Path(str(node[key])).expanduser().absolute())


def validate_names(overrides: Sequence[str]) -> DictConfig:
    """Validate the keys and choices of overrides, including sweeps, without composing each job.

    Returns
    -------
    DictConfig
        The config of the choices, before values are set.

    Raises
    ------
    InputError
        A key or choice does not exist.
    """
    overrides = normalize_searchpath(overrides)
    parsed = parse(overrides)
    known_groups = config_groups(search_folders(overrides))
    chosen = [override for override in overrides if override.startswith(f"{SEARCHPATH_KEY}=")]
    for override in parsed:
        group = override.key_or_group.split("@")[0]
        if group in known_groups:
            check_choices(override, group=group, choices=known_groups[group])
            if not override.is_sweep_override():
                chosen.append(str(override.input_line))
            elif group == "experiment" and isinstance(several := override.value(), ChoiceSweep):
                chosen.append(f"experiment={several.list[0]}")  # the first one defines the valid keys
    defaults = compose_config(chosen)[0]
    known = [key for key, _ in flatten(defaults, inner=True)]
    swept = [o.key_or_group for o in parsed if o.is_sweep_override() and o.key_or_group in known_groups]
    for override in parsed:
        key = override.key_or_group
        if override.is_delete() and key.split(".")[0] not in ("evaluation", "final_evaluation"):
            raise InputError(f"~{key} deletes a required setting; set it to another value instead")
        open_key = override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra")
        below_swept = any(key.startswith(f"{group}.") for group in swept)
        if key.split("@")[0] not in known_groups:
            _check_not_renamed(override, known)
            if key not in known and not (open_key or below_swept):
                raise InputError(f"there is no setting {key!r}{did_you_mean(key, known)}; `fedssl --cfg job` shows all")
    return defaults


def _check_not_renamed(override: Override, known: Sequence[str]) -> None:
    for name in _names(override):
        if name not in known:
            check_renamed(name)


def _names(override: Override) -> Iterator[str]:
    """Yield the names in an override: its key, keys in its value, and ``key=value`` for each string."""
    yield override.key_or_group.split("@")[0]
    value = override.value()
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        yield from _inner_names(override.key_or_group, one)


def _inner_names(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield f"{key}={value}"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield f"{key}.{name}"
            yield from _inner_names(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _inner_names(f"{key}.*", inner)


def validate_config(config: DictConfig) -> None:
    """Validate ranges and combinations of settings; raise `InputError` if one is invalid."""
    for key, minimum in MINIMUM.items():
        if config[key] < minimum:
            raise InputError(f"{key}={config[key]} but it must be at least {minimum}; set {key}={minimum} or more")
    for key, choices in CHOICES.items():
        if config[key] not in choices:
            raise InputError(f"{key}={config[key]} is not valid; choose one of {', '.join(choices)}")
    if config.collapse_images == 1:
        raise InputError(
            "collapse_images=1 but a standard deviation needs at least two images; set 2 or more, or 0 to disable it"
        )
    _check_clients(config)
    if config.early_stopping and config.early_stopping.monitor is not None and config.evaluate_every == 0:
        raise InputError(
            f"early_stopping.monitor={config.early_stopping.monitor} needs evaluations during the run, but "
            "evaluate_every=0; set evaluate_every=1 or more"
        )
    _check_groups(config)
    clip_norm = config.clip_norm
    if clip_norm is not None and (type(clip_norm) not in (int, float) or not clip_norm > 0):
        raise InputError(f"clip_norm={clip_norm} must be a positive number, or null to disable clipping")
    threads = config.threads
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
        raise InputError(f"threads={threads} but it must be an integer from 1 to {MAX_THREADS}, or null for automatic")


def _check_groups(config: DictConfig) -> None:
    for group, (key, choice, other) in _GROUP_REQUIREMENTS.items():
        if config[group][key] is not None and other not in config[group]:
            raise InputError(f"{group}.{key}={config[group][key]} needs {group}={choice}; add it")


def _check_clients(config: DictConfig) -> None:
    clients, asked, unseen_clients = config.num_clients, config.clients_per_round, config.unseen_clients
    if asked > clients:
        raise InputError(
            f"clients_per_round={asked} is more than num_clients={clients}; "
            "lower clients_per_round or raise num_clients"
        )
    if unseen_clients >= clients:
        raise InputError(f"unseen_clients={unseen_clients} of num_clients={clients} never train; lower unseen_clients")
    if asked > clients - unseen_clients:
        raise InputError(
            f"clients_per_round={asked} but unseen_clients={unseen_clients} of num_clients={clients} never train; "
            f"set clients_per_round={clients - unseen_clients} or fewer"
        )


def diff(left: DictConfig, right: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ between two configs, with both values."""
    old, new = dict(flatten(left)), dict(flatten(right))
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def compose_config(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the resolved config, and the choice of every group."""
    config, choices = compose_unresolved(overrides)
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise InputError(" ".join(str(error).split())) from error
    return config, choices


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
    changeable = any("${" in line for line in lines) or bool(folders)
    try:
        cached, choices = _composed.__wrapped__(lines) if changeable else _composed(lines)
        config = copy.deepcopy(cached)
        apply_overrides(values, config)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(" ".join(str(error).split())) from error
    names = config_groups(folders)
    return config, {group: name for group, name in choices.items() if group in names}


def _chooses(override: Override, folders: Sequence[Path]) -> bool:
    """Whether Hydra needs a word to compose the nodes, or to refuse it, as what it is not there for."""
    key = override.key_or_group
    if override.package is not None or override.is_sweep_override() or key.startswith("hydra"):
        return True
    return any((root / key).is_dir() for root in (CONF, *folders)) and not isinstance(override.value(), dict)


@functools.lru_cache(maxsize=256)
def _composed(overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    """Return the config with interpolations, and the choices. Callers must copy the cached config."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
    choices = {str(group): str(name) for group, name in config.hydra.runtime.choices.items() if name}
    with open_dict(config):
        del config["hydra"]
    return config, choices


def flatten(node: DictConfig, prefix: str = "", *, inner: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; with ``inner`` also those of nested nodes."""
    for key in node:
        value, name = node[key], prefix + str(key)
        if isinstance(value, DictConfig):
            if inner:
                yield name, value
            yield from flatten(value, f"{name}.", inner=inner)
        else:
            yield name, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def check_type(key: str, value: Any, default: Any) -> None:
    """Raise `InputError` if a value lacks the type of its default. A float accepts integers; null accepts all types."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list like [1,2]"}
    allowed = (int, float) if isinstance(default, float) else (type(default),)
    mistaken_bool = isinstance(value, bool) and not isinstance(default, bool)
    # A data set may lack a split, and a cache may be disabled.
    nullable = value is None and (key.startswith("dataset.splits.") or key.endswith("dataset.cache"))
    if default is not None and not nullable and (not isinstance(value, allowed) or mistaken_bool):
        raise InputError(f"{key}={value} is not {names[type(default)]}; the default is {default}")
