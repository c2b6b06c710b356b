"""Conversion of a validated config to typed settings."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from fedssl.config.aggregation_settings import AggregationSettings, PrivacySettings, SecureAggregationSettings
from fedssl.config.component import Component
from fedssl.config.compose import check_resolved
from fedssl.config.overrides import check_run_id, did_you_mean
from fedssl.config.saved_run import BASE_FOLDER, INITIAL_ENCODER_FILE
from fedssl.config.settings import (
    SERVER_ENCODER_KEYS,
    AlgorithmSettings,
    CalibrationSettings,
    ClientSettings,
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
from fedssl.config.statistics_settings import StatisticsSettings
from fedssl.datasets.splits import HELD_OUT, same_split, split_of_word
from fedssl.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")


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
        partition=partition_settings(config),
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
    # The test consists of these domains, or of a split with its own name: no share of the others is held out.
    has_own_test = held_out or test is None or split_of_word(test) not in HELD_OUT
    if has_own_test and "test_fraction" in reader.values:
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


def partition_settings(config: DictConfig) -> PartitionSettings:
    """Return the settings of the partition, of the clients' share of the images, and of their feature shift."""
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
    if node.dataset is not None and "splits" not in node.dataset:
        raise InputError(
            f"calibration.dataset={node.dataset} is no data set; leave it out, or add +dataset@calibration.dataset=NAME"
        )
    return CalibrationSettings(
        when=node.when,
        data=read_data(node.dataset or config.dataset),
        has_own_dataset=node.dataset is not None,
        share=node.share,
        epochs=node.epochs,
    )


def _read(kind: type[Group], node: DictConfig, /, **given: Any) -> Group:
    """Return a dataclass whose fields are ``given``, or settings of the same names."""
    values = {}
    for field in fields(kind):
        if field.name not in given:
            value = node[field.name]
            values[field.name] = _component(value) if field.type is Component else value
    return kind(**values, **given)


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
