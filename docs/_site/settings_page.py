"""The reference of all settings.

Values are those of `fedssl.config.constraints`; defaults and descriptions are those of ``conf/``.
"""

import importlib
from pathlib import Path

import yaml
from conf_files import CONF, GROUPS, PACKAGES, Setting, as_code, settings, target

from fedssl.config.constraints import find_constraint

_WITHOUT_SETTINGS = ("experiment", "augmentation")  # an augmentation has recipes, see fedssl/augmentation/recipe.py
_NOT_OF_THE_GROUP = ("aggregation.", "protocols")  # prefixes of settings that are not those of the group
_TYPES = {  # of defaults of settings without a range
    bool: "true or false",
    str: "a string",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}
_HEAD = Path(__file__).parent / "settings_head.md"


def settings_page() -> str:
    """Return the text of the page."""
    config = (CONF / "config.yaml").read_text()
    rows = [row for row in settings(config[config.index("\nseed:") :]) if not row.key.startswith("hydra.")]
    sections = [_section("All runs", [("", "", row) for row in rows])]
    for group, title in GROUPS.items():
        if group in _WITHOUT_SETTINGS:
            continue
        files = sorted((CONF / group).glob("*.yaml"))
        of_group = [(group, file.stem, row) for file in files for row in settings(file.read_text())]
        inner = [(group, choice, row) for group, choice, row in of_group if not row.key.startswith(_NOT_OF_THE_GROUP)]
        if inner:
            sections.append(_section(title, inner))
    return "\n".join([_HEAD.read_text(), *sections])


def _section(title: str, rows: list[tuple[str, str, Setting]]) -> str:
    lines = [f"## {title}", "", "| setting | value | default | |", "|---|---|---|---|"]
    by_key: dict[str, list[tuple[str, Setting]]] = {}
    for group, choice, row in rows:
        by_key.setdefault(f"{group}.{row.key.removeprefix(f'{group}.')}".lstrip("."), []).append((choice, row))
    for key, choices in by_key.items():
        if all(row.default.startswith("#") for _, row in choices):  # a nested node
            continue
        values = _by_choice([(choice, _values(key, choice, row)) for choice, row in choices], separator="; ")
        comments = dict.fromkeys(row.comment.rstrip(".") for _, row in choices if row.comment)
        defaults = _by_choice([(choice, as_code(row.default)) for choice, row in choices])
        lines.append(f"| `{key}` | {_cell(values)} | {defaults} | {_cell('; '.join(comments))} |")
    return "\n".join([*lines, ""])


def _values(key: str, choice: str, row: Setting) -> str:
    """Return the type and the range of a setting."""
    parts = key.split(".")
    group = parts[0] if len(parts) > 1 else ""
    module, _, owner = _target(group, choice).rpartition(".")
    own = getattr(importlib.import_module(module), "RANGES", {}) if module.split(".")[0] in PACKAGES else {}
    if constraint := own.get(parts[-1]) or find_constraint(group, parts[-1], owner=owner):
        return str(constraint)
    default = yaml.safe_load(row.default or "null")
    return _TYPES.get(type(default), "a string, or null")


def _target(group: str, choice: str) -> str:
    """Return the class or function of a choice."""
    return target(group, (CONF / group / f"{choice}.yaml").read_text()) if choice else ""


def _by_choice(cells: list[tuple[str, str]], *, separator: str = ", ") -> str:
    """Return the cell of all choices, or each different cell with its choices."""
    choices: dict[str, list[str]] = {}
    for choice, cell in cells:
        choices.setdefault(cell, []).append(choice)
    if len(choices) == 1:
        return cells[0][1]
    return separator.join(f"{cell} ({', '.join(names)})" for cell, names in choices.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
