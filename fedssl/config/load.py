"""Conversion of the config to typed settings, and the settings files of a run folder."""

import copy
import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from fedssl.config.aggregation_settings import AggregationSettings, PrivacySettings, SecureAggregationSettings
from fedssl.config.compose import RESUMABLE_KEYS, check_resolved, resolve_config
from fedssl.config.literal import user_path
from fedssl.config.overrides import (
    CONF,
    by_key,
    check_run_id,
    did_you_mean,
    key_and_group,
    parse,
    partition_by_key,
    quote_value,
)
from fedssl.config.saved_run import (
    INITIAL_ENCODER_FILE,
    check_saved_overrides,
    read_overrides,
    read_settings,
    recheck_saved,
    restore_initial_weights,
    saved_teacher,
)
from fedssl.config.settings import (
    SERVER_ENCODER_KEYS,
    AlgorithmSettings,
    CalibrationSettings,
    ClientSettings,
    Component,
    DataSettings,
    EarlyStopping,
    EngineSettings,
    EvaluationSettings,
    FeatureShift,
    MachineSettings,
    ModelSettings,
    PartitionSettings,
    RecordingSettings,
    ScheduleSettings,
    Settings,
    TrainingSettings,
)
from fedssl.config.statistics_settings import StatisticsSettings, without_requests
from fedssl.config.targets import normalize
from fedssl.datasets.splits import same_split
from fedssl.errors import InputError, shortened
from fedssl.plain_values import diff, flatten, plain_values
from fedssl.safe_io import load_plain_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")

log = logging.getLogger("fedssl")

BASE_FOLDER = "base"  # beside the folder of the client states: base layers, see `fedssl.base_layers`
DEVICE_NUMBERS_FILE = "devices.json"  # in the run folder: client ids of edge clients by name
_RUN_KEYS = {"resume", "output_dir", "run_id"}


def compose(overrides: Sequence[str]) -> Settings:
    """Return the settings for overrides such as ``strategy=fedavg partition.alpha=0.1``; `InputError` if invalid."""
    overrides = normalize(overrides)
    config, choices = resolve_config(overrides)
    return make_settings(config, choices, overrides=overrides, resumed=None)


def load_settings(overrides: Sequence[str]) -> Settings:
    """Return the settings of a new or resumed run.

    With ``resume=FOLDER`` the saved overrides of that run come first, and a new override replaces a saved one of the
    same key. Only `RESUMABLE_KEYS` may differ from that run. ``pause_after`` is not inherited. The number of threads is
    that of the run, whose default depends on the machine, because it decides the order of sums.
    """
    overrides = normalize(overrides)
    given = [override.value() for override in parse(overrides) if override.key_or_group == "resume"]
    if not given or given[-1] is None:
        return compose(overrides)
    folder = user_path(str(given[-1])).resolve()
    saved, saved_overrides = read_settings(folder / "config.yaml"), read_overrides(folder / "overrides.yaml")
    if saved is None or saved_overrides is None:
        missing = " and ".join(name for name in ("config.yaml", "overrides.yaml") if not (folder / name).exists())
        raise InputError(
            f"resume={folder} is not a run folder: {missing} is missing; set resume to a run folder, or start the run "
            "again"
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
    if config.teacher is not None and "teacher_encoder" in config.method and not Path(config.teacher).exists():
        config.method.teacher_encoder = saved_teacher(saved, folder / "config.yaml")
    # The number of edge clients is counted, and their images are not partitioned.
    counted = {"num_clients", "clients_per_round", "partition"} if (folder / DEVICE_NUMBERS_FILE).exists() else set()
    resumable = RESUMABLE_KEYS | _RUN_KEYS | counted
    if choices["client_speed"] != "none":  # a deadline in virtual time decides which clients take part
        resumable -= {"aggregation.round_deadline"}
    known = {key for key, _ in flatten(saved)}  # a setting that did not exist then has its default
    changed = {
        key: values
        for key, values in diff(saved, config).items()
        if not {key, key.split(".")[0]} & resumable and (key in known or key in explicit)
    }
    if changed:
        listed = shortened((f"{key}={old} (now {new})" for key, (old, new) in changed.items()), maximum=8)
        raise InputError(f"resume={folder} was run with {listed}; keep the settings, or start a new run")
    recorded = [*overrides, *(override for override in sources if override.partition("=")[0] not in merged)]
    return make_settings(config, choices, overrides=recorded, resumed=saved["rounds"])


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
    config = OmegaConf.create(plain_values(load_plain_yaml(text), "settings", special=None))
    assert isinstance(config, DictConfig)
    return read_data(config.dataset), _partition(config)


@functools.lru_cache(maxsize=4)
def parse_client_config(text: str) -> ClientSettings:
    """Return the settings of a simulated client from `Settings.client_yaml`.

    The YAML names classes and paths of the user's command. It is for clients on the user's machines only.
    """
    config = OmegaConf.create(plain_values(load_plain_yaml(text), "settings", special=None))
    assert isinstance(config, DictConfig)
    return client_settings(config, states=Path(config.output_dir) / "clients", partition=_partition(config))


def client_settings(config: DictConfig, *, states: Path, partition: PartitionSettings | None) -> ClientSettings:
    """Return the settings of a client from a resolved config."""
    model, training, strategy = training_components(config)
    return ClientSettings(
        seed=config.seed,
        states=states,
        base_folders=(states.parent / BASE_FOLDER,),
        data=read_data(config.dataset),
        partition=partition,
        model=model,
        training=training,
        strategy=strategy,
        machine=_read(MachineSettings, config, compile_encoder=config.compile),
    )


def training_components(config: DictConfig) -> tuple[ModelSettings, TrainingSettings, Component]:
    """Return the settings of model, training and strategy."""
    encoder = _component(config.encoder, without=SERVER_ENCODER_KEYS)
    schedule = ScheduleSettings(phases=_component(config.schedule), rounds=config.rounds)
    return (
        _read(ModelSettings, config, encoder=encoder, schedule=schedule, weights=None),
        _read(TrainingSettings, config, epochs=config.local_epochs),
        _component(config.strategy, without=("reported_metrics",)),
    )


def read_data(node: DictConfig) -> DataSettings:
    """Return the settings of a data set; unknown keys are arguments of its reader.

    Raise an `InputError` if the test has the labeled training images.
    """
    train, test = node.splits.train, node.splits.test
    if train is not None and test is not None and same_split(train, test):
        raise InputError(
            f"dataset.splits.train={train} and dataset.splits.test={test} are the same images: every classifier is "
            "right on them; set dataset.splits.test to another split, or to null for no test"
        )
    not_for_reader = ("splits", "limit", "test_limit", "mean", "std", "num_classes", "held_out")
    held_out = node.get("held_out")
    held_out = [] if held_out is None else [held_out] if isinstance(held_out, str) else list(held_out)
    reader = _component(node, without=not_for_reader)
    if held_out and "test_fraction" in reader.values:  # all of their images are for the test, and none of the others
        reader = Component({**reader.values, "test_fraction": 0.0})
    return _read(
        DataSettings,
        node,
        name=str(node.get("hub") or node["_target_"].split(".")[-2]),
        reader=reader,
        held_out=tuple(held_out),
        federated=node.splits.federated,
        train=train,
        test=test,
        mean=tuple(node.mean),
        std=tuple(node.std),
    )


def make_settings(
    config: DictConfig, choices: Mapping[str, str], *, overrides: Sequence[str], resumed: int | None
) -> Settings:
    """Convert a validated config, which becomes read-only. ``resumed`` are the rounds of the run that is resumed."""
    if config.run_id is None:
        config.run_id = f"r{uuid.uuid4().hex[:11]}"  # without the letter, YAML reads 12e4 as a number
    config.run_id = str(config.run_id)
    check_run_id(config.run_id)
    check_resolved(config)
    OmegaConf.set_readonly(config, True)
    model, training, strategy = training_components(config)
    folder = None if config.output_dir is None else Path(config.output_dir).resolve()
    weights = config.encoder.get("weights")
    if weights is not None and resumed is not None and folder is not None:
        weights = str(folder / INITIAL_ENCODER_FILE)
    return _read(
        Settings,
        config,
        data=read_data(config.dataset),
        partition=_partition(config),
        model=replace(model, weights=weights),
        training=training,
        algorithm=AlgorithmSettings(
            strategy=strategy,
            server_optimizer=_component(config.server_optimizer),
            model_average=_component(config.model_average),
            reported_metrics=tuple(config.strategy.get("reported_metrics", ())),
        ),
        calibration=_calibration(config),
        statistics=_group(StatisticsSettings, config, "statistics"),
        teacher=None if config.teacher is None else Path(config.teacher),
        aggregation=_group(AggregationSettings, config, "aggregation"),
        secure_aggregation=None
        if config.secure_aggregation.clipping_range is None
        else _group(SecureAggregationSettings, config, "secure_aggregation"),
        privacy=None if config.privacy.clip_norm is None else _group(PrivacySettings, config, "privacy"),
        evaluation=_read(
            EvaluationSettings,
            config,
            every=config.evaluate_every,
            early_stopping=_group(EarlyStopping, config, "early_stopping"),
            protocol=_component(config.evaluation),
            final_protocol=_component(config.final_evaluation),
            personalized=config.evaluate_personalized,
        ),
        machine=_read(MachineSettings, config, compile_encoder=config.compile),
        engine=_group(EngineSettings, config, "engine"),
        recording=_read(
            RecordingSettings,
            config,
            folder=folder,
            resumed=resumed,
            max_state_bytes=config.client_state.max_bytes,
            overrides=tuple(overrides),
            choices=choices,
            config=config,
        ),
    )


def _read(kind: type[Group], node: DictConfig, /, **given: Any) -> Group:
    """Return a dataclass whose fields are ``given``, or settings of the same names."""
    values = {}
    for field in fields(kind):
        if field.name not in given:
            value = node[field.name]
            values[field.name] = _component(value) if field.type is Component else value
    return kind(**values, **given)


def _partition(config: DictConfig) -> PartitionSettings:
    node = config.calibration
    return PartitionSettings(
        rule=_component(config.partition),
        num_clients=config.num_clients,
        seed=config.seed,
        server_fraction=node.share if node.when and node.dataset is None else None,
        cache=config.dataset.get("cache"),
        imbalance=config.imbalance,
        feature_shift=_group(FeatureShift, config, "feature_shift"),
    )


def _calibration(config: DictConfig) -> CalibrationSettings | None:
    node = config.calibration
    if not node.when:
        return None
    return CalibrationSettings(
        when=node.when,
        data=read_data(node.dataset or config.dataset),
        has_own_dataset=node.dataset is not None,
        share=node.share,
        epochs=node.epochs,
    )


def _group(kind: type[Group], config: DictConfig, key: str) -> Group:
    values: dict[str, Any] = config[key] or {}
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise InputError(f"there is no setting {key}.{name}{did_you_mean(str(name), known)}; remove it")
    return kind(**values)


def _component(node: DictConfig, *, without: Sequence[str] = ()) -> Component:
    values: Any = OmegaConf.to_container(node, resolve=True)
    return Component({key: value for key, value in values.items() if key not in without})
