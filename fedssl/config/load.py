"""Settings of new, resumed and changed runs, and of simulated clients."""

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.config.compose import RESUMABLE_KEYS, resolve_config
from fedssl.config.constraints import constraint_of
from fedssl.config.literal import absolute_path, user_path
from fedssl.config.overrides import CONF, by_key, key_and_group, parse, partition_by_key, quote_value
from fedssl.config.saved_run import (
    DEVICE_NUMBERS_FILE,
    check_saved_overrides,
    read_overrides,
    read_settings,
    recheck_saved,
    restore_initial_weights,
    restore_masks,
    saved_teacher,
)
from fedssl.config.settings import ClientSettings, DataSettings, PartitionSettings, Settings
from fedssl.config.statistics_settings import without_requests
from fedssl.config.targets import normalize
from fedssl.config.typed_settings import client_settings, make_settings, partition_settings, read_data
from fedssl.errors import InputError, shortened
from fedssl.logs import log
from fedssl.plain_values import diff, flatten, plain_values
from fedssl.safe_io import load_plain_yaml

IMAGES_FILE = "images.txt"  # in the run folder: number, size and digest of the clients' image files
_RUN_KEYS = {"resume", "output_dir", "run_id"}


def compose(overrides: Sequence[str]) -> Settings:
    """Return the settings for overrides such as ``strategy=fedavg partition.alpha=0.1``; `InputError` if invalid."""
    overrides = normalize(overrides)
    config, choices = resolve_config(overrides)
    return make_settings(config, choices, overrides=overrides, resumed=None)


def load_settings(overrides: Sequence[str]) -> Settings:
    """Return the settings of a new or resumed run.

    With ``resume=FOLDER`` the saved overrides of that run come first, and a new override replaces a saved one of the
    same key. Only `RESUMABLE_KEYS` and the path of the same images may differ from that run. ``pause_after`` is not
    inherited. The number of threads is that of the run, whose default depends on the machine, because it decides the
    order of sums.
    """
    overrides = normalize(overrides)
    given = {override.key_or_group: override.value() for override in parse(overrides)}
    if given.get("resume") is None:
        return compose(overrides)
    folder, output = user_path(str(given["resume"])).resolve(), given.get("output_dir")
    if output is not None and user_path(str(output)).resolve() != folder:
        raise InputError(
            f"output_dir={output} but resume={folder} continues in its folder; leave output_dir out, or resume a copy "
            "of that folder"
        )
    saved, saved_overrides = read_settings(folder / "config.yaml"), read_overrides(folder / "overrides.yaml")
    if saved is None or saved_overrides is None:
        missing = [name for name in ("config.yaml", "overrides.yaml") if not (folder / name).exists()]
        raise InputError(
            f"resume={folder} is not a run folder: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing; set resume to a run folder, or start the run again"
        )
    measured = saved["statistics"]["measured"]
    explicit = by_key(without_requests(overrides) if measured else overrides)
    # The run folder has the initial weights, so that the source is read only for a new run.
    saved_overrides, sources = partition_by_key(saved_overrides, "encoder.weights")
    # A new choice of a group, such as engine=local, replaces the saved one and its settings.
    not_inherited = explicit.keys() | {"pause_after"}
    inherited = [override for override in saved_overrides if not_inherited.isdisjoint(key_and_group(override))]
    check_saved_overrides(inherited, folder / "overrides.yaml")
    threads = {} if "threads" in explicit else {"threads": f"threads={saved['threads']}"}
    merged = {**by_key(inherited), **threads, **explicit}  # in the order of the run's own command
    overrides = [override for key, override in merged.items() if key.lstrip("+~") not in _RUN_KEYS]
    overrides += [f"output_dir={quote_value(str(folder))}", f"resume={quote_value(str(folder))}"]
    try:
        config, choices = resolve_config(overrides)
    except InputError:
        recheck_saved(saved_overrides, folder / "overrides.yaml")
        raise
    config.run_id = saved["run_id"]
    config.statistics.measured = measured or None
    restore_initial_weights(config, saved, explicit=explicit.keys())
    restore_masks(config, saved, explicit=explicit.keys())
    if config.teacher is not None and "teacher_encoder" in config.method and not Path(config.teacher).exists():
        config.method.teacher_encoder = saved_teacher(saved, folder / "config.yaml")
    # The number of edge clients is counted, and their images are not partitioned.
    counted = {"num_clients", "clients_per_round", "partition"} if (folder / DEVICE_NUMBERS_FILE).exists() else set()
    # Images may have moved, if a digest decides whether they are the same.
    moved = {"dataset.path"} if (folder / IMAGES_FILE).exists() else set()
    resumable = RESUMABLE_KEYS | _RUN_KEYS | counted | moved
    if choices["client_speed"] != "none":  # a deadline in virtual time decides which clients take part
        resumable -= {"aggregation.round_deadline"}
    known = {key for key, _ in flatten(saved)}  # a setting that did not exist then has its default
    changed = {
        key: values
        for key, values in diff(saved, config).items()
        if not {key, key.split(".")[0]} & resumable
        and (key in known or key in explicit)
        and not _is_same_path(key, *values)
    }
    if changed:
        texts = ((key, *map(_text, values)) for key, values in changed.items())
        listed = shortened((f"{key}={old} (now {new})" for key, old, new in texts), maximum=8)
        raise InputError(f"resume={folder} was run with {listed}; keep the settings, or start a new run")
    if config.threads != saved["threads"]:
        log.warning(
            "threads=%d, but the run had threads=%d: results differ in their last bits",
            config.threads,
            saved["threads"],
        )
    recorded = [*overrides, *(override for override in sources if override.partition("=")[0] not in merged)]
    return make_settings(config, choices, overrides=recorded, resumed=saved["rounds"])


def _text(value: Any) -> str:
    """Return a value as an override has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_same_path(key: str, old: Any, new: Any) -> bool:
    """Return whether both values are the same path, of which earlier versions kept ``..``."""
    constraint, paths = constraint_of(key), (isinstance(value, str) for value in (old, new))
    return constraint is not None and constraint.kind is Path and all(paths) and absolute_path(old) == Path(new)


def default_unlabeled_partition(settings: Settings) -> Settings:
    """Return settings with ``partition=iid`` if images have no labels and the partition was not overridden."""
    recording = settings.recording
    chosen = {override.key_or_group.partition(".")[0] for override in parse(recording.overrides)}
    if recording.choices["partition"] != "dirichlet" or chosen & {"partition", "experiment"}:
        return settings
    log.info("partition=dirichlet needs labels, which the images lack; using partition=iid instead")
    return with_partition(settings, "iid", overrides=[*recording.overrides, "partition=iid"])


def with_partition(settings: Settings, choice: str, *, overrides: Sequence[str] | None = None) -> Settings:
    """Return settings with another choice of the partition. ``overrides`` are as in `with_values`."""
    values, choices = OmegaConf.load(CONF / "partition" / f"{choice}.yaml"), settings.recording.choices
    return with_values(settings, {"partition": values}, overrides=overrides, choices={**choices, "partition": choice})


def with_values(
    settings: Settings,
    values: Mapping[str, Any],
    *,
    overrides: Sequence[str] | None = None,
    choices: Mapping[str, str] | None = None,
) -> Settings:
    """Return settings with other values of top-level keys; nothing is composed or validated again.

    ``overrides`` and ``choices`` are recorded for resumed runs; None keeps those of ``settings``.
    """
    recording = settings.recording
    config = copy.deepcopy(recording.config)
    OmegaConf.set_readonly(config, False)
    for key, value in values.items():
        config[key] = value
    overrides = recording.overrides if overrides is None else overrides
    return make_settings(config, choices or recording.choices, overrides=overrides, resumed=recording.resumed)


def with_run_folder(settings: Settings, folder: Path, *, paths: Mapping[str, str] | None = None) -> Settings:
    """Return settings with a run folder. ``paths`` are recorded as further overrides, for resumed runs elsewhere."""
    recorded = {**(paths or {}), "output_dir": str(folder)}
    overrides = [override for override in settings.recording.overrides if override.partition("=")[0] not in recorded]
    overrides += [f"{key}={quote_value(value)}" for key, value in recorded.items()]
    return with_values(settings, {"output_dir": str(folder)}, overrides=overrides)


@functools.lru_cache(maxsize=4)
def parse_client_images(text: str) -> tuple[DataSettings, PartitionSettings]:
    """Return the data set and the partition of a simulated client, as `parse_client_config`, also without a folder."""
    config = _client_config(text)
    return read_data(config.dataset), partition_settings(config)


@functools.lru_cache(maxsize=4)
def parse_client_config(text: str) -> ClientSettings:
    """Return the settings of a simulated client from `Settings.client_yaml`.

    The YAML names classes and paths of the user's command. It is for clients on the user's machines only.
    """
    config = _client_config(text)
    return client_settings(config, states=Path(config.output_dir) / "clients", partition=partition_settings(config))


def _client_config(text: str) -> DictConfig:
    config = OmegaConf.create(plain_values(load_plain_yaml(text), "settings", special=None))
    assert isinstance(config, DictConfig)
    return config
