"""Config files, read as text for the site: heads, settings, and the comments that describe them."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PACKAGES = ("fedssl", "strategies", "client_app", "server_app", "simulation")
GROUPS = {  # titles of the groups, in the order of the site
    "strategy": "Strategies",
    "method": "Methods",
    "regularizer": "Regularizers",
    "partition": "Partitions",
    "evaluation": "Evaluation protocols",
    "tuning": "Tuning",
    "schedule": "Schedules",
    "encoder": "Encoders",
    "augmentation": "Augmentations",
    "dataset": "Datasets",
    "optimizer": "Optimizers",
    "lr_schedule": "Learning-rate schedules",
    "server_optimizer": "Server optimizers",
    "model_average": "Averages over rounds",
    "calibration": "Calibration",
    "privacy": "Differential privacy",
    "secure_aggregation": "Secure aggregation",
    "availability": "Availability of clients",
    "client_speed": "Speed of clients",
    "engine": "Engines",
    "tracker": "Trackers",
    "experiment": "Experiments",
}
_SETTING = re.compile(r"^( *)([a-z]\w*):(?: +(.*?))?(?: +# (.*))?$")
_DEFAULT = re.compile(r"(?:/\w+/)?([\w/]+)(?:@_here_)?")


class Setting(NamedTuple):
    """Setting of a choice, with its default and its comment."""

    key: str
    default: str
    comment: str


def head_lines(text: str) -> list[str]:
    """Return the comment at the start of a file, with commands as code."""
    comments = [line.removeprefix("#").strip() for line in text.split("\n", 200) if line.startswith("#")]
    count = next((index for index, line in enumerate(text.splitlines()) if not line.startswith("#")), len(comments))
    lines = [line for line in comments[:count] if not line.startswith("@package")]
    return [f"\n```\n{line}\n```\n" if line.startswith("fedssl") else plain(line) for line in lines]


def head(text: str) -> str:
    """Return the comment at the start of a file, on one line."""
    return " ".join(line for line in head_lines(text) if not line.startswith("\n```"))


def settings(text: str) -> Iterator[Setting]:
    """Yield the settings of a file with dotted keys, and with the comments above and behind them."""
    above: list[tuple[int, str]] = []
    comments: list[str] = []
    for line in itertools.dropwhile(lambda line: line.startswith("#"), text.splitlines()):
        if line.lstrip().startswith("#"):
            comments.append(line.lstrip("# "))
            continue
        comment, comments = " ".join(comments), []
        match = _SETTING.match(line)
        if match is None or match[2] == "defaults":
            continue
        indent = len(match[1])
        above = [(before, key) for before, key in above if before < indent]
        key = ".".join([*(key for _, key in above), match[2]])
        above.append((indent, match[2]))
        if match[3] or match[4]:
            yield Setting(key, match[3] or "", " ".join(filter(None, (comment, match[4]))))


def as_code(text: str) -> str:
    """Return the text as code of a table's cell; empty text stays empty."""
    return f"`{text.replace('|', '/')}`" if text else ""


def plain(text: str) -> str:
    """Escape Markdown."""
    return re.sub(r"([*_|\[\]`])", r"\\\1", text.replace("<", "&lt;").replace(">", "&gt;"))


def cell(text: str) -> str:
    """Return the text of a table's cell, escaped unless it is already."""
    return text if "\\" in text else plain(text)


def target(group: str, text: str) -> str:
    """Return the class or function of a choice, or that of the choice of its group that it starts from; or nothing."""
    if found := re.search(r"^_target_: ([\w.]+)$", text, flags=re.MULTILINE):
        return found[1]
    defaults = (yaml.safe_load(text) or {}).get("defaults", [])
    for default in defaults:
        match = _DEFAULT.fullmatch(default) if isinstance(default, str) else None
        file = CONF / group / f"{match[1].removeprefix(f'{group}/')}.yaml" if match else None
        if file is not None and file.is_file():
            return target(group, file.read_text())
    return ""
