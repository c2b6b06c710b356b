"""Validation of a composed config: types and ranges of settings, and their combinations."""

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.config.constraint import as_yaml
from fedssl.config.constraints import constraints_in
from fedssl.config.targets import installed_targets
from fedssl.errors import InputError
from fedssl.plain_values import flatten, plain_config

# Groups that are off by default: a key that ``none`` also has, the choice that uses it, and a key only of that choice.
_GROUP_REQUIREMENTS = {
    "calibration": ("when", "auxiliary", "share"),
    "privacy": ("clip_norm", "central", "noise_multiplier"),
    "secure_aggregation": ("clipping_range", "secagg_plus", "threshold"),
}


def validate_config(config: DictConfig) -> None:
    """Validate combinations of settings; raise `InputError` if one is invalid."""
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
    delta = config.privacy.get("delta")
    if delta is not None and delta >= 1 / config.num_clients:
        raise InputError(
            f"privacy.delta={delta} is a probability with which a client of num_clients={config.num_clients} may be "
            f"revealed, and must be below 1 / num_clients; set privacy.delta={0.1 / config.num_clients:.1g} or less"
        )


def _check_groups(config: DictConfig) -> None:
    for group, (key, choice, other) in _GROUP_REQUIREMENTS.items():
        if config[group][key] is not None and other not in config[group]:
            raise InputError(
                f"{group}.{key}={config[group][key]} needs {group}={choice}; add it, or leave out {group}.{key}"
            )
        if config[group][key] is None and other in config[group]:
            raise InputError(f"{group}.{key}=null disables {group}={choice}; set a value, or {group}=none")


def _check_clients(config: DictConfig) -> None:
    clients, per_round, unseen = config.num_clients, config.clients_per_round, config.unseen_clients
    if per_round > clients:
        raise InputError(
            f"clients_per_round={per_round} is more than num_clients={clients}; "
            "lower clients_per_round or raise num_clients"
        )
    if unseen >= clients:
        raise InputError(f"unseen_clients={unseen} of num_clients={clients} never train; lower unseen_clients")
    if per_round > clients - unseen:
        raise InputError(
            f"clients_per_round={per_round} but unseen_clients={unseen} of num_clients={clients} never train; "
            f"set clients_per_round={clients - unseen} or fewer"
        )


def check_types(config: DictConfig, defaults: Mapping[str, Any]) -> None:
    """Raise `InputError` if a value violates the constraint of its setting, or lacks the type of its default."""
    plain = plain_config(config)
    constrained, values = check_constraints(plain, defaults), dict(flatten(plain))
    parents = {name[:place] for name in values for place, character in enumerate(name) if character == "."}
    for key, default in defaults.items():
        if key in values and key not in constrained:  # an override may delete a key: ~key
            check_type(key, values[key], default)
        elif key in parents and default is not None:
            check_type(key, OmegaConf.to_container(OmegaConf.select(config, key)), default)
    for key, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        infinite = [number for number in numbers if isinstance(number, float) and not math.isfinite(number)]
        if infinite:
            raise InputError(f"{key}={value} contains {infinite[0]}; set a finite number")
    for group in ("aggregation", "early_stopping", "client_state", "statistics", "feature_shift", "dataset.splits"):
        node = OmegaConf.select(config, group)
        if not isinstance(node, DictConfig) and (group, node) != ("feature_shift", None):
            raise InputError(
                f"{group}={as_yaml(node)} replaces a group of settings; set each of them, e.g. {group}.KEY=null"
            )


def check_constraints(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Raise `InputError` if a plain value violates the constraint of its setting; return the keys that have one."""
    constrained = set()
    found = constraints_in(settings, installed=installed_targets())
    # An augmentation has the size and the statistics of the data set, which is reported.
    for key, value, constraint in sorted(found, key=lambda each: each[0].startswith("augmentation.")):
        if value == "None" and constraint.optional and constraint.is_text:
            raise InputError(f"{key}=None is text; write {key}=null for no value")
        if not constraint.allows(value):
            default = f"; the default is {as_yaml(defaults[key])}" if key in defaults else ""
            raise InputError(f"{key}={as_yaml(value)} must be {constraint.describe(value)}{default}")
        constrained.add(key)
    return constrained


def check_type(key: str, value: Any, default: Any) -> None:
    """Raise `InputError` if a value lacks the type of its default. A float accepts integers; null accepts all types."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list like [1,2]"}
    allowed = (int, float) if isinstance(default, float) else (type(default),)
    mistaken_bool = isinstance(value, bool) and not isinstance(default, bool)
    # A data set may lack a split, and a cache may be disabled.
    nullable = value is None and (key.startswith("dataset.splits.") or key.endswith("dataset.cache"))
    if default is not None and not nullable and (not isinstance(value, allowed) or mistaken_bool):
        raise InputError(f"{key}={value} is not {names[type(default)]}; the default is {default}")
