"""All experiments: their names, the commands in their comments, and overrides for a short run."""

import io
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig
from PIL import Image

from fedssl.config.overrides import CONF, check_choices, config_groups, parse
from fedssl.plain_values import flatten

FOLDER = CONF / "experiment"
EXPERIMENTS = sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml"))
OF_PAPERS = [name for name in EXPERIMENTS if "/" in name]
GROUPS = config_groups()


def write_images(folder: Path, *, splits: Mapping[str, int]) -> None:
    """Write random images of 32x32 as the Hub stores them, with the columns of every data set here.

    Parameters
    ----------
    folder : Path
    splits : mapping of str to int
        Number of images in each split; labels are those of ten classes in turn, and -1 in ``unlabeled``.
    """
    for split, number in splits.items():
        random, files = np.random.default_rng(number), []
        for _ in range(number):
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(file, "PNG")
            files.append({"bytes": file.getvalue(), "path": None})
        column = pa.array(files, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        label = pa.array(np.full(number, -1) if split == "unlabeled" else np.arange(number) % 10, pa.int64())
        table = pa.table({"img": column, "image": column, "label": label, "fine_label": label})
        pq.write_table(table, folder / f"{split}-0.parquet")


def commands(text: str) -> list[list[str]]:
    """Return the overrides of every line ``# fedssl ...`` of a text, without ``-m``; other lines are skipped."""
    lines = [shlex.split(line) for line in re.findall(r"^# fedssl (?:-m )?(.*)$", text, flags=re.M)]
    return [overrides for overrides in lines if all("=" in override for override in overrides)]


def head(name: str) -> str:
    """The comments on top of an experiment's file."""
    return (FOLDER / f"{name}.yaml").read_text().partition("\ndefaults:")[0]


def written(name: str) -> tuple[list[str], list[str], int]:
    """What an experiment's file itself says, without composing it.

    Returns
    -------
    experiments : list of str
        That it begins with.
    overrides : list of str
        Its choices, as on the command line, and the keys that it sets, each with a value of no meaning.
    num_clients : int
        Of it, or of the experiment that it begins with.
    """
    node = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    defaults, _sweep = node.pop("defaults", []), node.pop("hydra", None)
    node.get("sweep", {}).pop("axes", None)  # whose keys are chosen freely
    below = [entry.removeprefix("/experiment/") for entry in defaults if isinstance(entry, str)]
    chosen = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    overrides = [f"{group.removeprefix('override ').removeprefix('/')}={choice}" for group, choice in chosen]
    overrides += [f"{key}=1" for key in _keys(node, "")]
    return below, overrides, node.get("num_clients") or (written(below[0])[2] if below else 10)


def jobs(overrides: Iterable[str], *, all_values: bool = False) -> Iterator[list[str]]:
    """Yield the overrides of every run of a sweep; of a setting that is no group, by default only the first value."""
    values = [_values(override, all_values=all_values) for override in parse(list(overrides))]
    yield from map(list, product(*values))


def _values(override: Override, *, all_values: bool) -> list[str]:
    value = override.value()
    if isinstance(value, Glob):
        names = value.filter([name for name in GROUPS[override.key_or_group] if "/" not in name])
        return [f"{override.key_or_group}={name}" for name in names]
    if not override.is_sweep_override():
        return [str(override.input_line)]
    values = [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
    return values if all_values or override.key_or_group in GROUPS else values[:1]


def check_saved_overrides(overrides: Iterable[str]) -> None:
    """Check that choices exist, and keys in a file of their group, without composing."""
    parsed = parse(list(overrides))
    for override in parsed:
        group = override.key_or_group.split("@")[0]
        if group in GROUPS:
            check_choices(override, group=group, choices=GROUPS[group])
        else:
            assert override.key_or_group in KEYS, override.input_line


def _keys(node: Any, prefix: str) -> Iterator[str]:
    """Every key in a file of ``conf/``, as on the command line."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


KEYS = set(_keys(yaml.safe_load((CONF / "config.yaml").read_text()), ""))
for _group in GROUPS.keys() - {"experiment"}:
    for _file in (CONF / _group).rglob("*.yaml"):
        KEYS |= set(_keys(yaml.safe_load(_file.read_text()), f"{_group}."))


def small(config: DictConfig, *, data: Path) -> list[str]:
    """Words that make an experiment of any size a run of a second on the images in ``data``."""
    overrides = ["rounds=1", "local_epochs=1", "batch_size=8", "threads=1", "device=cpu", "engine=local"]
    overrides += ["evaluate_every=0", "collapse_images=0", "measure_resources=false"]
    if config.num_clients > 10:
        overrides += ["num_clients=10", "clients_per_round=2"]
    if "vit" in config.encoder._target_:
        overrides += ["encoder.depth=2", "encoder.width=16", "encoder.heads=2", "rounds=2"]
    elif config.encoder._target_.endswith(".timm"):
        overrides.append("encoder.name=test_resnet")
    elif "conv_small" not in config.encoder._target_:
        overrides += ["encoder=conv_small", "encoder.width=4"]
    if config.partition.get("classes_per_client", 0) > 10:
        overrides.append("partition.classes_per_client=10")  # as many as the images have
    overrides += [f"method.{name}.hidden_dim=8" for name in ("projector", "predictor") if name in config.method]
    return overrides + [override for key, _ in flatten(config) for override in _paths(key, data)]


def _paths(key: str, data: Path) -> list[str]:
    parts = key.split(".")
    if parts[-1] == "path" and ("dataset" in parts or "datasets" in parts):
        return [f"{key}={data}"]
    training = {"epochs": 1, "warmup": 0} if key.startswith("final_evaluation") else {}
    return [f"{key}={training[parts[-1]]}"] if parts[-1] in training else []
