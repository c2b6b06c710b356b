"""Validation of the settings in a run folder, which is untrusted: it may be damaged, or come from somebody else.

A folder may select installed choices by name. Settings that point outside the folder (config directories, dotted names,
interpolations, paths, clusters) are accepted only if the user's own overrides repeat them.
"""

import logging
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.atomic_files import write_text
from fedssl.config.compose import resolve_config
from fedssl.config.constraints import constraint_of
from fedssl.config.hydra_internals import Override
from fedssl.config.literal import shell_command, user_path
from fedssl.config.overrides import check_run_id, config_groups, parse, quote_value
from fedssl.config.settings import RecordingSettings
from fedssl.errors import InputError, sanitize, shortened
from fedssl.logs import log_once
from fedssl.plain_values import RUN_KEYS, flatten, plain_values
from fedssl.safe_io import checksum_line, corrupt_file_error, read_text, read_yaml

DEVICE_NUMBERS_FILE = "devices.json"  # in the run folder: client ids of edge clients by name
BASE_FOLDER = "base"  # beside the folder of the client states: base layers, see `fedssl.base_layers`
INITIAL_ENCODER_FILE = "initial_encoder.pt"  # in the folder of a run with encoder.weights, from which it is resumed

# Image caches, addresses of clusters and SuperLinks, and trackers.
_EXTERNAL_KEYS = {"dataset.cache", "calibration.dataset.cache", "engine.address", "engine.root_certificates"}
_EXTERNAL_KEYS |= {"tracker.uri", "tracker.mode"}
_SAFE_VALUES = (None, "auto")  # values of these


def save_run(recording: RecordingSettings, folder: Path) -> None:
    """Write the overrides, the choice of every group, and the resolved config."""
    for name, content in (
        ("overrides", OmegaConf.create(list(recording.overrides))),
        ("choices", OmegaConf.create(dict(recording.choices))),
        ("config", recording.config),
    ):
        text = OmegaConf.to_yaml(content)
        write_text(folder / f"{name}.yaml", f"{checksum_line(text)}\n{text}")


def read_overrides(file: Path) -> list[str] | None:
    """Read the overrides of ``overrides.yaml``; return None if the file does not exist."""
    overrides: list[str] | None = read_yaml(file, list)
    if overrides is not None and not all(isinstance(override, str) for override in overrides):
        raise corrupt_file_error(file, "it has no list of overrides")
    return overrides


def check_saved_overrides(overrides: Sequence[str], file: Path) -> None:
    """Reject overrides of ``file``, except those that the user's command sets, that point outside its run folder."""
    outside = [text for text in overrides if points_outside(text, file)]
    if outside:
        which = "which" if len(outside) == 1 else "each of which"
        raise InputError(
            f"{file} contains {shortened(outside)}, {which} points outside the run folder and is accepted only from "
            "your own command, because the folder may come from somebody else; if you trust it, add the override there "
            "(a config directory as --config-dir FOLDER)"
        )


def resume_command(folder: Path) -> str:
    """Return the shell command that continues the user's own run; that of Flower for devices of its federation."""
    overrides = resume_overrides(folder)
    command = shell_command(overrides)
    is_of_flower = (folder / DEVICE_NUMBERS_FILE).exists() and "engine=deployment" not in overrides  # `flwr run`
    if is_of_flower and not {*str(folder)} & {*"'\"\\"}:  # which Flower's configuration cannot have
        run_config = f'overrides="{command.partition(" ")[2]}"'
        return f"flwr run . FEDERATION --stream --run-config {shlex.quote(run_config)}"
    return command


def warn_unless_finished(encoder: Path) -> None:
    """Log that the encoder of a run may be that of an earlier round, if the run was continued or sends it meanwhile."""
    folder = encoder.parent
    # Not a run, or the parts of one that somebody passed on; or `INITIAL_ENCODER_FILE`.
    if not (folder / "metrics.jsonl").is_file() or not encoder.name.startswith("encoder"):
        return
    with suppress(InputError):  # a damaged summary counts as missing
        if re.search(r'"status": *"finished"', read_text(folder / "summary.json") or ""):
            return
    log_once(
        logging.WARNING,
        f"the run {folder} is not finished, and its encoder may be of an earlier round; finish the run with "
        f"{resume_command(folder)}",
    )


def resume_overrides(folder: Path) -> list[str]:
    """Return the overrides that continue the user's own run, with settings that are accepted only from there."""
    file = folder / "overrides.yaml"
    try:
        overrides = read_overrides(file) or []
        outside = [override for override in overrides if points_outside(override, file)]
    except InputError:  # the command reports the damaged file
        overrides = outside = []
    # A choice of a group in the command replaces all settings of the group that the folder has.
    groups = tuple(f"{key}." for override in outside if (key := override.partition("=")[0]) in config_groups())
    given = [override for override in overrides if override in outside or override.startswith(groups)]
    return [*given, f"resume={quote_value(str(folder))}"]


def points_outside(text: str, file: Path) -> bool:
    """Return whether an override of ``file`` points outside its run folder; `InputError` if it is invalid."""
    try:
        (override,) = parse([text])
        if override.is_sweep_override():
            raise ValueError(f"{text} has several values")
        return _value_points_outside(override, override.value())
    except (InputError, ValueError, RecursionError) as error:
        raise corrupt_file_error(file, " ".join(sanitize(error).split())[:300]) from error


def check_directory(overrides: Sequence[str], file: Path, *, directory: str) -> None:
    """Refuse relative paths among the overrides of ``file``, given in ``directory``, in another working directory."""
    for override in parse(overrides) if directory != str(Path.cwd()) else ():
        constraint = constraint_of(override.key_or_group)
        paths = [str(override.value())]
        if override.is_sweep_override():
            paths = [text.strip("'\"") for text in override.sweep_string_iterator()]
        is_masks = override.key_or_group.endswith(".masks") and any((Path(directory) / path).is_dir() for path in paths)
        if not is_masks and (constraint is None or constraint.kind is not Path):
            continue
        if any(value not in ("auto", "None") and not user_path(value).is_absolute() for value in paths):
            raise InputError(
                f"{override.input_line} in {file} is relative to {directory}, where the sweep was started; resume it "
                f"there, or add {override.key_or_group}=FILE_OR_FOLDER"
            )


def _value_points_outside(override: Override, value: Any) -> bool:
    key = override.key_or_group.partition("@")[0]
    if key in config_groups():
        return not isinstance(value, str | NoneType) or (key, value) == ("engine", "deployment")
    return (
        "/" in key  # an unknown group
        or key.partition(".")[0] == "hydra"
        or any(name in _EXTERNAL_KEYS and inner not in _SAFE_VALUES for name, inner in flatten({key: value}))
        or not _is_plain(dict.fromkeys(key.split("."), value))
    )


def _is_plain(value: Any) -> bool:
    try:
        plain_values(value, "value")
    except ValueError:
        return False
    return True


def read_settings(file: Path) -> dict[str, Any] | None:
    """Read the saved config of a run as plain values, to compare them; return None if there is no file.

    Nothing calls its special keys: the commands compose the settings of the chosen names. `fedssl.evaluation.cli` calls
    only the reader of the data set, if it is in a list; the data set has no other special key.
    """
    content = read_yaml(file, dict)
    if content is None:
        return None
    try:
        saved: dict[str, Any] = plain_values(content, "settings", special=RUN_KEYS)
        _check_dataset(saved.get("dataset"))
        numbers = dict.fromkeys(("seed", "rounds", "threads"), int)
        _check_kinds(saved, {**numbers, "run_id": str, "method": dict, "encoder": dict})
        if not isinstance(saved["encoder"].get("weights"), str | None):
            raise ValueError("encoder.weights has the wrong type")
        saved.setdefault("statistics", {"measured": None})  # of an earlier version
        _check_kinds(saved, {"statistics": dict})
        _check_kinds(saved["statistics"], {"measured": dict | None}, prefix="statistics.")
        check_run_id(saved["run_id"])
    except (InputError, ValueError, RecursionError) as error:
        raise corrupt_file_error(file, str(error)) from error
    return saved


def restore_masks(config: DictConfig, saved: Mapping[str, Any], *, explicit: Collection[str]) -> None:
    """Set the masks of a resumed run: whether a name is that of a folder depends on the working directory."""
    for key, value in flatten(saved):
        is_inherited = key.endswith(".masks") and {key, key.split(".")[0]}.isdisjoint(explicit)
        if is_inherited and OmegaConf.select(config, key) is not None:
            OmegaConf.update(config, key, value)


def restore_initial_weights(config: DictConfig, saved: Mapping[str, Any], *, explicit: Collection[str]) -> None:
    """Set the source of the initial weights of a resumed run, and the statistics that a new run takes from it."""
    source = saved["encoder"].get("weights")
    if source is None:
        return
    if "encoder.weights" not in explicit:
        OmegaConf.update(config, "encoder.weights", source, force_add=True)
    for key in ("mean", "std"):
        if f"dataset.{key}" not in explicit:
            for group in ("dataset", "augmentation"):
                OmegaConf.update(config, f"{group}.{key}", saved[group][key], merge=False)


def saved_teacher(saved: Mapping[str, Any], file: Path) -> Any:
    """Return the description of the teacher whose weights are in the checkpoints; its file is gone."""
    try:
        return plain_values(saved["method"].get("teacher_encoder"), "method.teacher_encoder")
    except ValueError as error:
        raise corrupt_file_error(file, str(error)) from error


def recheck_saved(overrides: Sequence[str], file: Path) -> None:
    """Raise `InputError` if the saved overrides are invalid by themselves."""
    try:
        resolve_config([override for override in overrides if override.partition("=")[0] != "output_dir"])
    except InputError as error:
        raise corrupt_file_error(file, str(error)) from error


def _check_dataset(node: Any) -> None:
    """Raise a `ValueError` unless the settings of a data set have the types that readers of data sets need."""
    if not isinstance(node, dict):
        raise ValueError("dataset is missing or has the wrong type")
    plain_values({key: value for key, value in node.items() if key != "_target_"}, "dataset")
    _check_kinds(
        node,
        {
            **dict.fromkeys(("channels", "size"), int),
            **dict.fromkeys(("limit", "test_limit", "num_classes"), int | None),
            "_target_": str,
            "splits": dict,
            "mean": list,
            "std": list,
        },
        prefix="dataset.",
    )
    splits = {key: node["splits"].get(key, 0) for key in ("federated", "train", "test")}
    _check_kinds(splits, dict.fromkeys(splits, str | None), prefix="dataset.splits.")
    for key in ("mean", "std"):
        if not all(isinstance(value, int | float) for value in node[key]):
            raise ValueError(f"dataset.{key} is missing or has the wrong type")


def _check_kinds(node: Mapping[str, Any], kinds: Mapping[str, type | UnionType], *, prefix: str = "") -> None:
    wrong = [key for key, kind in kinds.items() if key not in node or not isinstance(node[key], kind)]
    if wrong:
        raise ValueError(f"{prefix}{wrong[0]} is missing or has the wrong type")
