"""Settings: composed from conf/ by Hydra, checked across fields, and handed out as typed values.

Nothing outside this module sees a node of the configuration. A run keeps its settings as one resolved YAML.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedssl.errors import InputError
from fedssl.files import write_text
from fedssl.machine.threads import default_threads
from fedssl.plugins import SEARCH, add_import_path, check_targets, choice_targets, search_folders, with_folders
from fedssl.settings import (
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
from fedssl.words import CONF, check_choices, groups, nearest, parse, quote, refuse_renamed

MINIMUM = {
    "seed": 0,
    "num_clients": 1,
    "clients_per_round": 1,
    "rounds": 1,
    "local_epochs": 0,
    "batch_size": 2,
    "client_timeout": 1,
    "evaluate_every": 0,
    "health_pictures": 0,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
}
CHOICES = {"device": ("auto", "cpu", "cuda"), "precision": ("fp32", "bf16")}

# Settings that do not change the numbers of a run, and its length.
MAY_CHANGE = (
    *("rounds", "engine", "tracker", "device", "threads", "allocator", "client_timeout"),
    *("evaluate_every", "final_evaluation", "health_pictures", "measure_resources"),
    *("checkpoint_every", "keep_checkpoints"),
)

# What a client must know; engine, evaluation and tracking are no concern of it.
CLIENT_SETTINGS = [
    *("seed", "num_clients", "rounds", "dataset", "partition", "augmentation", "encoder", "method", "regularizer"),
    *("schedule", "lr_schedule", "calibration", "optimizer", "strategy", "local_epochs", "batch_size", "clip_norm"),
    *("precision", "channels_last", "compile"),
    *("device", "threads", "allocator", "output_dir", "run_id"),
]


def compose(words: Sequence[str]) -> Settings:
    """The settings for command-line words such as ``strategy=fedavg partition.alpha=0.1``.

    Raises
    ------
    InputError
        A name, choice or value is not valid; see `check` for the fields.
    """
    words = with_folders(words)
    config, choices = resolve(words)
    return _settings(config, choices, words=words, resumed=None)


def load_run(words: Sequence[str]) -> Settings:
    """The settings of a run, new or resumed.

    With ``resume=FOLDER`` the words of that folder's run come first, and a new word replaces an old one for the same
    key. Apart from `MAY_CHANGE` the settings must be those of that run.

    Raises
    ------
    InputError
        Besides what `compose` raises: the folder holds no run, or a run with other settings.
    """
    given = [override.value() for override in parse(words) if override.key_or_group == "resume"]
    if not given or given[-1] is None:
        return compose(words)
    folder = Path(str(given[-1])).resolve()
    if not (folder / "config.yaml").is_file() or not (folder / "overrides.yaml").is_file():
        raise InputError(f"resume={folder} is not a run folder: it has no config.yaml; give the folder of a run")
    saved = OmegaConf.load(folder / "config.yaml")
    assert isinstance(saved, DictConfig)
    own = ("resume", "output_dir", "run_id")
    saved_words = OmegaConf.load(folder / "overrides.yaml")
    newest = {word.partition("=")[0]: word for word in [*saved_words, *with_folders(words)]}
    words = [word for key, word in newest.items() if key not in own]
    words += [f"output_dir={quote(str(folder))}", f"resume={quote(str(folder))}"]
    config, choices = resolve(words)
    config.run_id = saved.run_id
    changed = {
        key: values
        for key, values in differences(saved, config).items()
        if key not in own and key.split(".")[0] not in MAY_CHANGE
    }
    if changed:
        listed = ", ".join(f"{key}={old} (now {new})" for key, (old, new) in changed.items())
        raise InputError(f"resume={folder} was run with {listed}; leave these as they were, or start a new run")
    return _settings(config, choices, words=words, resumed=saved.rounds)


def compose_evaluation(words: Sequence[str], *, run: Path | None) -> Settings:
    """The settings of an evaluation: where the words name no data set or seed, those of ``run``.

    A run's folder may come from elsewhere, and code is not chosen by it: its data set must be one of ``conf/`` or of
    the user's folders that the words name.

    Raises
    ------
    InputError
        A word is not valid, or nothing says which data set.
    """
    words = with_folders(words)
    keys = [word.partition("=")[0] for word in words]
    if run is None:
        if "dataset" not in keys:
            raise InputError("encoder=FILE does not say which data set; add dataset=NAME, e.g. dataset=cifar10")
        return compose(words)
    saved = _read_run(run)
    changes = [] if "dataset" in keys else [word for word in words if word.startswith("dataset.")]
    words = [word for word in words if word not in changes]
    config, choices = resolve(words)
    if "dataset" not in keys:
        reader = str(saved.dataset.get("_target_"))
        if reader not in choice_targets("dataset", search_folders(words)):
            raise InputError(
                f"the data set of {run} is read by {reader}, which is not fedssl's; name the folder of settings that "
                "has it with --config-dir, or another data set with dataset=NAME"
            )
        try:
            config.dataset = OmegaConf.merge(saved, OmegaConf.from_dotlist(changes)).dataset
        except OmegaConfBaseException as error:
            raise InputError(
                f"{' '.join(changes)} does not fit the data set of {run}, which has the settings "
                f"{', '.join(map(str, saved.dataset))}; add dataset=NAME for another data set"
            ) from error
    if "seed" not in keys:
        config.seed = saved.seed
    return _settings(config, choices, words=words, resumed=None)


def save_run(recording: RecordingSettings, folder: Path) -> None:
    """Write what `load_run` reads: the words, the choice in every group, and all settings, resolved."""
    write_text(folder / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(list(recording.words))))
    write_text(folder / "choices.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(recording.choices))))
    write_text(folder / "config.yaml", recording.text)


def read_client(text: str) -> ClientSettings:
    """What a client must know of a run, from `Settings.client_text`."""
    config = OmegaConf.create(text)
    assert isinstance(config, DictConfig)
    return ClientSettings(
        seed=config.seed,
        run_id=config.run_id,
        folder=Path(config.output_dir),
        data=read_data(config.dataset),
        partition=_partition(config),
        model=_model(config),
        training=_training(config),
        strategy=_component(config.strategy, without=("metrics",)),
        machine=_machine(config),
    )


def check_names(words: Sequence[str]) -> DictConfig:
    """Check the keys and choices of command-line words, sweeps included, without composing each job.

    Returns
    -------
    DictConfig
        The settings as they are before any value is changed.

    Raises
    ------
    InputError
        A key or choice does not exist.
    """
    words = with_folders(words)
    parsed = parse(words)
    known_groups = groups(search_folders(words))
    chosen = [word for word in words if word.startswith(f"{SEARCH}=")]
    for override in parsed:
        group = override.key_or_group.split("@")[0]
        if group in known_groups:
            check_choices(override, group=group, choices=known_groups[group])
            if not override.is_sweep_override():
                chosen.append(str(override.input_line))
    defaults = _compose(chosen)[0]
    known = [key for key, _ in _flatten(defaults, inner=True)]
    swept = [o.key_or_group for o in parsed if o.is_sweep_override() and o.key_or_group in known_groups]
    for override in parsed:
        key = override.key_or_group
        if override.is_delete() and key.split(".")[0] not in ("evaluation", "final_evaluation"):
            raise InputError(f"~{key} takes away a setting that is needed; set it to another value")
        open_key = override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra")
        below_swept = any(key.startswith(f"{group}.") for group in swept)
        if key.split("@")[0] not in known_groups and key not in known and not (open_key or below_swept):
            refuse_renamed(key)
            raise InputError(f"there is no setting {key!r}{nearest(key, known)}; `fedssl --cfg job` shows all")
    return defaults


def resolve(words: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """The checked nodes of the configuration, without interpolations, and the choice in every group."""
    words = with_folders(words)
    defaults = check_names(words)
    config, choices = _compose(words)
    values = dict(_flatten(config))
    for key, default in _flatten(defaults):
        if key in values:  # a word may delete a key: ~key
            _check_type(key, values[key], default)
    check(config)
    add_import_path(words)
    check_targets(config)
    config.threads = config.threads or default_threads(config.dataset.size)
    if config.output_dir is not None:
        config.output_dir = str(config.output_dir)
    if config.dataset.get("path"):
        config.dataset.path = str(Path(str(config.dataset.path)).expanduser().absolute())
    return config, choices


def check(config: DictConfig) -> None:
    """Check fields against each other and against their ranges; raises `InputError`."""
    for key, minimum in MINIMUM.items():
        if config[key] < minimum:
            raise InputError(f"{key}={config[key]} but it must be at least {minimum}; set {key}={minimum} or more")
    for key, choices in CHOICES.items():
        if config[key] not in choices:
            raise InputError(f"{key}={config[key]} is not valid; choose one of {', '.join(choices)}")
    if config.health_pictures == 1:
        raise InputError("health_pictures=1 but a picture alone has no spread; set 2 or more, or 0 to turn it off")
    if config.clients_per_round > config.num_clients:
        raise InputError(
            f"clients_per_round={config.clients_per_round} is more than num_clients={config.num_clients}; "
            "lower clients_per_round or raise num_clients"
        )
    clip_norm = config.clip_norm
    if clip_norm is not None and (type(clip_norm) not in (int, float) or not clip_norm > 0):
        raise InputError(f"clip_norm={clip_norm} must be a positive number, or null to take any gradient as it is")
    if config.threads is not None and (type(config.threads) is not int or config.threads < 1):
        raise InputError(f"threads={config.threads} but it must be a whole number of at least 1, or null for automatic")


def differences(one: DictConfig, other: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ between two configurations, with both values."""
    left, right = dict(_flatten(one)), dict(_flatten(other))
    keys = dict.fromkeys([*left, *right])
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


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


def _read_run(run: Path) -> DictConfig:
    """The settings that a run saved; unknown keys cannot be merged into them."""
    try:
        saved = OmegaConf.load(run / "config.yaml")
    except OSError as error:
        raise InputError(
            f"{run / 'config.yaml'} cannot be read; give the folder of a run, or encoder=FILE dataset=NAME"
        ) from error
    assert isinstance(saved, DictConfig)
    OmegaConf.set_struct(saved, True)
    return saved


def _settings(config: DictConfig, choices: Mapping[str, str], *, words: Sequence[str], resumed: int | None) -> Settings:
    if config.run_id is None:
        config.run_id = uuid.uuid4().hex[:12]
    return Settings(
        seed=config.seed,
        num_clients=config.num_clients,
        clients_per_round=config.clients_per_round,
        rounds=config.rounds,
        client_timeout=config.client_timeout,
        data=read_data(config.dataset),
        partition=_partition(config),
        model=_model(config),
        training=_training(config),
        algorithm=AlgorithmSettings(
            strategy=_component(config.strategy, without=("metrics",)),
            server_optimizer=_component(config.server_optimizer),
            metrics=tuple(config.strategy.get("metrics", ())),
        ),
        calibration=_calibration(config),
        evaluation=EvaluationSettings(
            every=config.evaluate_every,
            protocol=_component(config.evaluation),
            final_protocol=_component(config.final_evaluation),
            health_pictures=config.health_pictures,
            resources=config.measure_resources,
        ),
        machine=_machine(config),
        engine=EngineSettings(
            name=config.engine.name,
            client_cpus=config.engine.get("client_cpus") or config.threads,
            client_gpus=config.engine.get("client_gpus", 0.0),
            verbose=config.engine.get("verbose", False),
        ),
        recording=RecordingSettings(
            folder=None if config.output_dir is None else Path(config.output_dir).resolve(),
            run_id=config.run_id,
            resumed=resumed,
            checkpoint_every=config.checkpoint_every,
            keep_checkpoints=config.keep_checkpoints,
            tracker=config.tracker.name,
            words=tuple(words),
            choices=choices,
            text=OmegaConf.to_yaml(config),
        ),
        client_text=OmegaConf.to_yaml(OmegaConf.masked_copy(config, CLIENT_SETTINGS)),
    )


def _partition(config: DictConfig) -> PartitionSettings:
    node = config.calibration
    return PartitionSettings(
        rule=_component(config.partition),
        num_clients=config.num_clients,
        seed=config.seed,
        set_aside=node.share if node.at and node.dataset is None else None,
    )


def _model(config: DictConfig) -> ModelSettings:
    return ModelSettings(
        encoder=_component(config.encoder),
        method=_component(config.method),
        schedule=ScheduleSettings(
            phases=_component(config.schedule), lr=_component(config.lr_schedule), rounds=config.rounds
        ),
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
    )


def _machine(config: DictConfig) -> MachineSettings:
    return MachineSettings(
        device=config.device, threads=config.threads, allocator=config.allocator, compile_encoder=config.compile
    )


def _calibration(config: DictConfig) -> CalibrationSettings | None:
    node = config.calibration
    if not node.at:
        return None
    own = node.dataset is not None
    data = read_data(node.dataset if own else config.dataset)
    return CalibrationSettings(at=node.at, data=data, own=own, share=node.share, epochs=node.epochs)


def _component(node: DictConfig, *, without: Sequence[str] = ()) -> Component:
    values: Any = OmegaConf.to_container(node, resolve=True)
    return Component({key: value for key, value in values.items() if key not in without})


def _compose(words: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """The resolved nodes, and the choice in every group."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = hydra_compose("config", overrides=list(words), return_hydra_config=True)
            choices = OmegaConf.to_container(config.hydra.runtime.choices)
            with open_dict(config):
                del config["hydra"]
            OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(" ".join(str(error).split())) from error
    assert isinstance(choices, dict)
    names = groups(search_folders(words))
    return config, {str(group): str(name) for group, name in choices.items() if group in names and name}


def _flatten(node: DictConfig, prefix: str = "", *, inner: bool = False) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; with ``inner`` also the keys of nested nodes."""
    for key in node:
        value, name = node[key], prefix + str(key)
        if isinstance(value, DictConfig):
            if inner:
                yield name, value
            yield from _flatten(value, f"{name}.", inner=inner)
        else:
            yield name, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _check_type(key: str, value: Any, default: Any) -> None:
    """A value must have the type of its default; whole numbers serve as fractions, and null defaults take anything."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", list: "a list like [1,2]"}
    allowed = (int, float) if isinstance(default, float) else (type(default),)
    mistaken_bool = isinstance(value, bool) and not isinstance(default, bool)
    nullable = key.startswith("dataset.splits.") and value is None  # the data set has no such pictures
    if default is not None and not nullable and (not isinstance(value, allowed) or mistaken_bool):
        raise InputError(f"{key}={value} is not {names[type(default)]}; the default is {default}")
