"""Validation of the settings in a run folder, which is untrusted: it may be damaged, or come from somebody else.

A folder may select installed choices by name. Settings that point outside the folder (config directories, dotted names,
interpolations, paths, clusters) are accepted only if the user's own overrides repeat them.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedssl.config.compat import Override
from fedssl.config.overrides import check_run_id, config_groups, parse, to_text
from fedssl.config.renamed import CHOICES, current_key, is_earlier, update, update_choices
from fedssl.errors import InputError
from fedssl.untrusted import corrupt_file_error, iter_leaves, read_text, read_yaml, sanitize

INITIAL_ENCODER_FILE = "initial_encoder.pt"  # in the folder of a run with encoder.weights, from which it is resumed

# Image caches, addresses of clusters and SuperLinks, and trackers.
_EXTERNAL_KEYS = {"dataset.cache", "calibration.dataset.cache", "engine.address", "engine.root_certificates"}
_EXTERNAL_KEYS |= {"tracker.uri", "tracker.mode"}
_SAFE_VALUES = (None, "auto")  # values of these
_SPECIAL = re.compile(r"_[a-z]+_")  # keys by which Hydra calls something


def read_overrides(file: Path) -> list[str] | None:
    """Read the overrides of ``overrides.yaml``; return None if the file does not exist."""
    overrides: list[str] | None = read_yaml(file, list)
    if overrides is not None and not all(isinstance(override, str) for override in overrides):
        raise corrupt_file_error(file, "it has no list of overrides")
    return None if overrides is None else update_overrides(overrides, file.parent)


def update_overrides(overrides: Sequence[str], folder: Path) -> list[str]:
    """Return the overrides of a run folder; those of an earlier version get their current names."""
    return [update_override(override) for override in overrides] if is_of_earlier_version(folder) else list(overrides)


def is_of_earlier_version(folder: Path) -> bool:
    """Return whether the settings in a run folder have names of an earlier version."""
    try:
        return is_earlier(read_text(folder / "config.yaml") or "")
    except InputError:  # the reader of the damaged file reports it
        return False


def update_override(override: str) -> str:
    """Return a saved override with current names; an unreadable override stays unchanged."""
    name, equals, text = override.partition("=")
    sign = name[: len(name) - len(name.lstrip("+~"))]
    key = name.removeprefix(sign)
    if not equals:
        return sign + current_key(key)
    if key in CHOICES:
        text = update_choices({key: text})[key]
    elif "{" in text:  # nested settings
        try:
            (parsed,) = parse([override])
            value = parsed.value()
            text = text if update(value, key) == value else to_text(update(value, key))
        except (InputError, ValueError, RecursionError):
            pass  # its user reports the error
    else:
        text = update(text, key)
    return f"{sign}{current_key(key)}={text}"


def check_saved_overrides(overrides: Sequence[str], file: Path) -> None:
    """Reject overrides of ``file``, except those that the user's command sets, that point outside its run folder."""
    for text in overrides:
        try:
            (override,) = parse([text])
            value = override.value()
            outside = _escapes_run_folder(override, value)
        except (InputError, ValueError, RecursionError) as error:
            raise corrupt_file_error(file, " ".join(sanitize(error).split())[:300]) from error
        if outside:
            raise InputError(
                f"{file} contains {sanitize(text)}, which points outside the run folder and is accepted only from your "
                "own command, because the folder may come from somebody else; if you trust it, add the override there "
                "(a config directory as --config-dir FOLDER)"
            )


def _escapes_run_folder(override: Override, value: Any) -> bool:
    key = override.key_or_group.partition("@")[0]
    if key in config_groups():
        return not isinstance(value, str | NoneType) or (key, value) == ("engine", "deployment")
    return (
        "/" in key  # an unknown group
        or key.partition(".")[0] == "hydra"
        or any(_SPECIAL.fullmatch(part) for part in key.split("."))
        or (key in _EXTERNAL_KEYS and value not in _SAFE_VALUES)
        or calls(value)
        or any(isinstance(leaf, str) and "${" in leaf for leaf in iter_leaves([value]))
    )


def read_settings(file: Path) -> DictConfig | None:
    """Read the saved config of a run as a struct, which rejects unknown keys; return None if there is no file."""
    content = read_yaml(file, dict)
    if content is None:
        return None
    try:
        if any(isinstance(leaf, str) and "${" in leaf for leaf in iter_leaves(content)):
            raise corrupt_file_error(file, "it has an interpolation, ${...}, although runs save resolved values")
        saved: DictConfig = OmegaConf.create(update(content) if is_of_earlier_version(file.parent) else content)
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise (
            error if isinstance(error, InputError) else corrupt_file_error(file, "it is not the YAML file of a run")
        ) from error
    kinds = {"seed": int, "rounds": int, "threads": int, "run_id": str, "dataset": DictConfig}
    if not all(key in saved and isinstance(saved[key], kind) for key, kind in kinds.items()):
        raise corrupt_file_error(file, "it lacks settings of a run")
    try:
        check_run_id(saved.run_id)
    except InputError as error:
        raise corrupt_file_error(file, str(error)) from error
    _check_dataset(saved.dataset, file)
    OmegaConf.set_struct(saved, True)
    return saved


def _check_dataset(node: DictConfig, file: Path) -> None:
    """Reject a saved data set whose settings have wrong types for `read_data`, or nested ``_target_`` keys."""
    kinds: dict[str, tuple[type, ...]] = {
        "_target_": (str,),
        "splits": (DictConfig,),
        **dict.fromkeys(("channels", "size"), (int,)),
        **dict.fromkeys(("limit", "test_limit", "num_classes"), (int, NoneType)),
        **dict.fromkeys(("mean", "std"), (ListConfig,)),
    }
    wrong = [key for key, kind in kinds.items() if key not in node or not isinstance(node[key], kind)]
    if not wrong:
        wrong = [key for key in ("federated", "train", "test") if not isinstance(node.splits.get(key, 0), str | None)]
        wrong += [key for key in ("mean", "std") if not all(isinstance(value, int | float) for value in node[key])]
        wrong += [str(key) for key in node if key != "_target_" and calls({key: node[key]})]
    if wrong:
        raise corrupt_file_error(file, f"dataset.{wrong[0]} is missing or has the wrong type")


def calls(value: Any) -> bool:
    """Return whether there is a key that makes Hydra call a target."""
    if isinstance(value, Mapping | DictConfig):
        return any(_SPECIAL.fullmatch(str(key)) or calls(value[key]) for key in value)
    return isinstance(value, list | ListConfig) and any(map(calls, value))
