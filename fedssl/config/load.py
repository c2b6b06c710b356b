"""Settings as typed values, made once for everybody who takes them, and kept by a run as one resolved YAML."""

import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedssl.atomic_files import write_text
from fedssl.config.aggregation_settings import AggregationSettings, PrivacySettings, SecureAggregationSettings
from fedssl.config.compose import RESUMABLE_KEYS, diff, resolve_config, validate_config
from fedssl.config.overrides import check_run_id, parse, quote_value
from fedssl.config.saved_run import check_saved_overrides, read_overrides, read_settings
from fedssl.config.settings import (
    AlgorithmSettings,
    CalibrationSettings,
    ClientSettings,
    Component,
    DataSettings,
    EngineSettings,
    EvaluationSettings,
    MachineSettings,
    ModelSettings,
    PartitionSettings,
    RecordingSettings,
    ScheduleSettings,
    Settings,
    TrainingSettings,
)
from fedssl.config.targets import choice_targets, normalize_searchpath, search_folders
from fedssl.early_stopping import EarlyStopping
from fedssl.errors import InputError
from fedssl.untrusted import corrupt_file_error

log = logging.getLogger("fedssl")

DEVICE_NUMBERS_FILE = "devices.json"  # in the run folder: which device has which number
_LISTED = 8  # settings that an error names

# What a simulated client must know; engine, evaluation and tracking are no concern of it.
CLIENT_SETTINGS = [
    *("seed", "num_clients", "rounds", "dataset", "partition", "augmentation", "encoder", "method", "regularizer"),
    *("schedule", "calibration", "optimizer", "strategy", "local_epochs", "batch_size", "clip_norm"),
    *("precision", "channels_last", "gpu_augmentation", "cuda_graphs", "compile"),
    *("device", "threads", "keep_freed_memory", "output_dir", "run_id"),
]


def compose(overrides: Sequence[str]) -> Settings:
    """The settings for command-line words such as ``strategy=fedavg partition.alpha=0.1``.

    Raises
    ------
    InputError
        A name, choice or value is not valid; see `fedssl.config.compose.validate_config` for the fields.
    """
    overrides = normalize_searchpath(overrides)
    config, choices = resolve_config(overrides)
    return _settings(config, choices, overrides=overrides, resumed=None)


def load_settings(overrides: Sequence[str]) -> Settings:
    """The settings of a run, new or resumed.

    With ``resume=FOLDER`` the words of that folder's run come first, and a new word replaces an old one for the same
    key. Apart from `RESUMABLE_KEYS` the settings must be those of that run.

    Raises
    ------
    InputError
        Besides what `compose` raises: the folder holds no run, or a run with other settings.
    """
    given = [override.value() for override in parse(overrides) if override.key_or_group == "resume"]
    if not given or given[-1] is None:
        return compose(overrides)
    folder = Path(str(given[-1])).resolve()
    saved, saved_overrides = read_settings(folder / "config.yaml"), read_overrides(folder / "overrides.yaml")
    if saved is None or saved_overrides is None:
        raise InputError(
            f"resume={folder} is not a run folder: it has no config.yaml, which a run has from its first round on; "
            "give the folder of a run, or start the run again"
        )
    own, overrides = ("resume", "output_dir", "run_id"), normalize_searchpath(overrides)
    # How many devices there are they say themselves.
    counted = ("num_clients", "clients_per_round") if (folder / DEVICE_NUMBERS_FILE).exists() else ()
    said = {word.partition("=")[0] for word in overrides}
    check_saved_overrides(
        [word for word in saved_overrides if word.partition("=")[0] not in said], folder / "overrides.yaml"
    )
    newest = {word.partition("=")[0]: word for word in [*saved_overrides, *overrides]}
    overrides = [word for key, word in newest.items() if key.lstrip("+~") not in own]
    overrides += [f"output_dir={quote_value(str(folder))}", f"resume={quote_value(str(folder))}"]
    try:
        config, choices = resolve_config(overrides)
    except InputError:
        _recheck_saved(saved_overrides, folder / "overrides.yaml")
        raise
    config.run_id = saved.run_id
    changed = {
        key: values
        for key, values in diff(saved, config).items()
        if key not in (*own, *counted) and not {key, key.split(".")[0]} & RESUMABLE_KEYS
    }
    if changed:
        listed = ", ".join(f"{key}={old} (now {new})" for key, (old, new) in list(changed.items())[:_LISTED])
        listed += f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
        raise InputError(f"resume={folder} was run with {listed}; leave these as they were, or start a new run")
    return _settings(config, choices, overrides=overrides, resumed=saved.rounds)


def _recheck_saved(overrides: Sequence[str], file: Path) -> None:
    """Tell by an `InputError` words of a run that are refused by themselves, whatever else is said."""
    try:
        resolve_config([word for word in overrides if word.partition("=")[0] != "output_dir"])
    except InputError as error:
        raise corrupt_file_error(file, str(error)) from error


def default_unlabeled_partition(settings: Settings) -> Settings:
    """The settings for images without labels, which the default partition cannot divide: with ``partition=iid``.

    What the words choose, themselves or by an experiment, stays, and is refused where it needs labels.
    """
    recording = settings.recording
    chosen = {override.key_or_group.partition(".")[0] for override in parse(recording.overrides)}
    if recording.choices["partition"] != "dirichlet" or chosen & {"partition", "experiment"}:
        return settings
    log.info("the images have no labels, which partition=dirichlet needs: partition=iid is taken")
    return load_settings([*recording.overrides, "partition=iid"])


def with_num_clients(settings: Settings, number: int, *, per_round: int) -> Settings:
    """The settings of a run with so many clients, in what is recorded of it as well."""
    text = OmegaConf.create(settings.recording.resolved_yaml)
    assert isinstance(text, DictConfig)
    text.num_clients, text.clients_per_round = number, per_round
    recording = replace(settings.recording, resolved_yaml=OmegaConf.to_yaml(text))
    return replace(settings, num_clients=number, clients_per_round=per_round, recording=recording)


def compose_evaluation(overrides: Sequence[str], *, run: Path | None) -> Settings:
    """The settings of an evaluation: where the words name no data set or seed, those of ``run``.

    A run's folder may come from elsewhere, and code is not chosen by it: its data set must be one of ``conf/`` or of
    the user's folders that the words name.

    Raises
    ------
    InputError
        A word is not valid, or nothing says which data set.
    """
    overrides = normalize_searchpath(overrides)
    keys = [word.partition("=")[0] for word in overrides]
    if run is None:
        if "dataset" not in keys:
            raise InputError("encoder=FILE does not say which data set; add dataset=NAME, e.g. dataset=cifar10")
        return compose(overrides)
    saved = read_settings(run / "config.yaml")
    if saved is None:
        raise InputError(f"{run / 'config.yaml'} is not there; give the folder of a run, or encoder=FILE dataset=NAME")
    changes = [] if "dataset" in keys else [word for word in overrides if word.startswith("dataset.")]
    overrides = [word for word in overrides if word not in changes]
    config, choices = resolve_config(overrides)
    if "dataset" not in keys:
        reader = str(saved.dataset.get("_target_"))
        if reader not in choice_targets("dataset", search_folders(overrides)):
            raise InputError(
                f"the data set of {run} is read by {reader}, which is not fedssl's; name the folder of settings that "
                "has it with --config-dir, or another data set with dataset=NAME"
            )
        if "cache" in saved.dataset:
            saved.dataset.cache = "auto"  # where files are written is not chosen by a run either
        try:
            config.dataset = OmegaConf.merge(saved, OmegaConf.from_dotlist(changes)).dataset
        except OmegaConfBaseException as error:
            raise InputError(
                f"{' '.join(changes)} does not fit the data set of {run}, which has the settings "
                f"{', '.join(map(str, saved.dataset))}; add dataset=NAME for another data set"
            ) from error
    if "seed" not in keys:
        config.seed = saved.seed
    validate_config(config)
    return _settings(config, choices, overrides=overrides, resumed=None)


def save_run(recording: RecordingSettings, folder: Path) -> None:
    """Write what `load_settings` reads: the words, the choice in every group, and all settings, resolved."""
    write_text(folder / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(list(recording.overrides))))
    write_text(folder / "choices.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(recording.choices))))
    write_text(folder / "config.yaml", recording.resolved_yaml)


@functools.lru_cache(maxsize=4)
def parse_client_config(text: str) -> ClientSettings:
    """What a simulated client must know of a run, from `Settings.client_yaml`.

    The text names classes and paths, and whoever reads it does what it says: it is for clients on the user's machine.
    """
    config = OmegaConf.create(text)
    assert isinstance(config, DictConfig)
    return client_settings(config, states=Path(config.output_dir) / "clients", partition=_partition(config))


def client_settings(config: DictConfig, *, states: Path, partition: PartitionSettings | None) -> ClientSettings:
    """What a client must know of a run, from resolved nodes."""
    model, training, strategy = training_components(config)
    return ClientSettings(
        seed=config.seed,
        states=states,
        data=read_data(config.dataset),
        partition=partition,
        model=model,
        training=training,
        strategy=strategy,
        machine=_machine(config),
    )


def training_components(config: DictConfig) -> tuple[ModelSettings, TrainingSettings, Component]:
    """What is trained, how, and by which strategy."""
    return _model(config), _training(config), _component(config.strategy, without=("reported_metrics",))


def read_data(node: DictConfig) -> DataSettings:
    """A node of the group ``dataset``, with the reader's own keys as its arguments."""
    not_for_reader = ("splits", "limit", "test_limit", "mean", "std", "num_classes")
    return DataSettings(
        name=str(node.get("hub") or node["_target_"].split(".")[-2]),
        reader=_component(node, without=not_for_reader),
        federated=node.splits.federated,
        train=node.splits.train,
        test=node.splits.test,
        limit=node.limit,
        test_limit=node.test_limit,
        channels=node.channels,
        size=node.size,
        mean=tuple(node.mean),
        std=tuple(node.std),
        num_classes=node.num_classes,
    )


def _settings(
    config: DictConfig, choices: Mapping[str, str], *, overrides: Sequence[str], resumed: int | None
) -> Settings:
    if config.run_id is None:
        config.run_id = f"r{uuid.uuid4().hex[:11]}"  # the letter keeps YAML from taking 12e4 or 1234 for a number
    config.run_id = str(config.run_id)
    check_run_id(config.run_id)
    return Settings(
        seed=config.seed,
        num_clients=config.num_clients,
        clients_per_round=config.clients_per_round,
        rounds=config.rounds,
        unseen_clients=config.unseen_clients,
        reply_timeout=config.reply_timeout,
        wire_dtype=config.wire_dtype,
        lr_schedule=_component(config.lr_schedule),
        data=read_data(config.dataset),
        partition=_partition(config),
        model=_model(config),
        training=_training(config),
        algorithm=AlgorithmSettings(
            strategy=_component(config.strategy, without=("reported_metrics",)),
            server_optimizer=_component(config.server_optimizer),
            reported_metrics=tuple(config.strategy.get("reported_metrics", ())),
        ),
        calibration=_calibration(config),
        teacher=None if config.teacher is None else Path(config.teacher),
        aggregation=AggregationSettings(**config.aggregation),
        secure_aggregation=None
        if config.secure_aggregation.clipping_range is None
        else SecureAggregationSettings(**config.secure_aggregation),
        privacy=None if config.privacy.clip_norm is None else PrivacySettings(**config.privacy),
        evaluation=EvaluationSettings(
            every=config.evaluate_every,
            early_stopping=EarlyStopping(**(config.early_stopping or {})),
            protocol=_component(config.evaluation),
            final_protocol=_component(config.final_evaluation),
            collapse_images=config.collapse_images,
            measure_resources=config.measure_resources,
            personalized=config.evaluate_personalized,
            adaptation_epochs=config.adaptation_epochs,
        ),
        machine=_machine(config),
        engine=EngineSettings(
            name=config.engine.name,
            address=config.engine.get("address"),
            root_certificates=config.engine.get("root_certificates"),
            client_cpus=config.engine.get("client_cpus"),
            client_gpus=config.engine.get("client_gpus"),
        ),
        recording=RecordingSettings(
            folder=None if config.output_dir is None else Path(config.output_dir).resolve(),
            run_id=config.run_id,
            resumed=resumed,
            checkpoint_every=config.checkpoint_every,
            keep_checkpoints=config.keep_checkpoints,
            snapshot_every=config.snapshot_every,
            tracker=_component(config.tracker),
            overrides=tuple(overrides),
            choices=choices,
            resolved_yaml=OmegaConf.to_yaml(config),
        ),
        client_yaml=OmegaConf.to_yaml(OmegaConf.masked_copy(config, CLIENT_SETTINGS)),
    )


def _partition(config: DictConfig) -> PartitionSettings:
    node = config.calibration
    return PartitionSettings(
        rule=_component(config.partition),
        num_clients=config.num_clients,
        seed=config.seed,
        server_fraction=node.share if node.when and node.dataset is None else None,
        cache=config.dataset.get("cache"),
    )


def _model(config: DictConfig) -> ModelSettings:
    return ModelSettings(
        encoder=_component(config.encoder),
        method=_component(config.method),
        schedule=ScheduleSettings(phases=_component(config.schedule), rounds=config.rounds),
        seed=config.seed,
    )


def _training(config: DictConfig) -> TrainingSettings:
    return TrainingSettings(
        augmentation=_component(config.augmentation),
        optimizer=_component(config.optimizer),
        regularizer=_component(config.regularizer),
        epochs=config.local_epochs,
        batch_size=config.batch_size,
        precision=config.precision,
        clip_norm=config.clip_norm,
        channels_last=config.channels_last,
        cuda_graphs=config.cuda_graphs,
    )


def _machine(config: DictConfig) -> MachineSettings:
    return MachineSettings(
        device=config.device,
        threads=config.threads,
        keep_freed_memory=config.keep_freed_memory,
        compile_encoder=config.compile,
    )


def _calibration(config: DictConfig) -> CalibrationSettings | None:
    node = config.calibration
    if not node.when:
        return None
    own = node.dataset is not None
    data = read_data(node.dataset if own else config.dataset)
    return CalibrationSettings(when=node.when, data=data, has_own_dataset=own, share=node.share, epochs=node.epochs)


def _component(node: DictConfig, *, without: Sequence[str] = ()) -> Component:
    values: Any = OmegaConf.to_container(node, resolve=True)
    return Component({key: value for key, value in values.items() if key not in without})
