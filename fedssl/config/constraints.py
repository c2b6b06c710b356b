"""The constraints of settings (`fedssl.config.constraint_table`), found by name or by key, and checked.

`fedssl.config.compose` validates the config by them before a run. What is also called directly, such as aggregators and
encoders, validates its arguments. A setting that only one class has may have its range in the mapping ``RANGES`` of the
module of this class, which its constructor checks.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import ListConfig

from fedssl.config.constraint import Constraint, as_yaml
from fedssl.config.constraint_table import CONSTRAINTS
from fedssl.errors import InputError


def find_constraint(group: str, name: str, *, owner: str = "") -> Constraint | None:
    """Return the constraint of a setting, first that of its class ``owner``; None if it has none."""
    own = CONSTRAINTS.get(owner, {}).get(name)
    return own or CONSTRAINTS.get(group, {}).get(name)


def constraint_of(key: str) -> Constraint | None:
    """Return the constraint of a setting by its dotted key, apart from those of classes; None if it has none."""
    node, _, name = key.rpartition(".")
    return find_constraint(group_of(node), name)


def group_of(key: str) -> str:
    """Return the group of the settings in a node, by its dotted key."""
    return functools.reduce(_group_of, key.split(".") if key else (), "")


def check_arguments(
    group: str, *, owner: str = "", key: str = "", ranges: Mapping[str, Constraint] | None = None, **values: Any
) -> None:
    """Raise `InputError` if an argument of a constructor violates the constraint of its name in the group.

    ``key`` is that of the settings in an error message; empty: the group. ``ranges`` are the ``RANGES`` of a module.
    """
    for name, value in values.items():
        constraint = (ranges or {}).get(name) or find_constraint(group, name, owner=owner)
        assert constraint is not None, f"{group}.{name} has no constraint"
        if not constraint.allows(value):
            raise InputError(f"{key or group}.{name}={as_yaml(value)} must be {constraint.describe(value)}")


def constraints_in(
    node: Mapping[str, Any], *, installed: frozenset[str], group: str = "", prefix: str = "", owner: str = ""
) -> Iterator[tuple[str, Any, Constraint]]:
    """Yield key, value and constraint of each setting that has one; classes that are not ``installed`` have none."""
    target = str(node.get("_target_") or "")
    owner = target.rpartition(".")[2] or owner
    if target and target not in installed:
        return
    for key, value in node.items():
        name = f"{prefix}{key}"
        constraint = find_constraint(group, str(key), owner=owner)
        nodes = _nodes_in(value) if constraint is None or constraint.kind is dict else {}
        if constraint and not nodes:
            yield name, value, constraint
        inner = _group_of(group, str(key))
        for suffix, settings in nodes.items():
            yield from constraints_in(
                settings, installed=installed, group=inner, prefix=f"{name}{suffix}.", owner=owner
            )


def _nodes_in(value: Any) -> dict[str, Mapping[str, Any]]:
    """Return the mappings of settings in a value, by what their keys have after that of the value."""
    if isinstance(value, Mapping):
        return {"": value}
    items = list(value) if isinstance(value, list | ListConfig) else []
    valid = all(isinstance(item, Mapping) for item in items)
    return {f".{index}": item for index, item in enumerate(items)} if valid else {}


def _group_of(group: str, key: str) -> str:
    """Return the group of the settings in the node ``key`` of a group."""
    named = {"dataset": "dataset", "datasets": "dataset", "view": "view", "views": "view", "mask": "mask"}
    if key in named:
        return named[key]
    return group or ("evaluation" if key == "final_evaluation" else key)
