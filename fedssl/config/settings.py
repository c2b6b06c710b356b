"""The settings of a run as values: what each collaborator takes, and no more. `fedssl.config.load` makes them, once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedssl.config.aggregation_settings import AggregationSettings, PrivacySettings, SecureAggregationSettings
from fedssl.early_stopping import EarlyStopping
from fedssl.errors import InputError

LOSSLESS = "fp32"
WIRE_DTYPES = (LOSSLESS, "fp16", "bf16", "int8")  # how layers travel, see `fedssl.wire.wire_format`


@dataclass(frozen=True)
class Component:
    """A class or function and its arguments, as a node of the configuration names them.

    Attributes
    ----------
    values : mapping
        ``_target_``, the dotted name, and the arguments: plain values, which may be nodes of their own.
    """

    values: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(json.dumps(self.values, sort_keys=True))

    @property
    def target(self) -> str:
        """The dotted name."""
        return str(self.values["_target_"])

    @property
    def name(self) -> str:
        """The last part of the dotted name, i.e. that of the class or function itself."""
        return self.target.rpartition(".")[2]

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with further arguments.

        Raises
        ------
        InputError
            It refuses its arguments. An `InputError` of its own comes out as it was raised.
        """
        from hydra.errors import InstantiationException  # here: who holds settings need not import Hydra
        from hydra.utils import instantiate

        try:
            return instantiate(dict(self.values), *args, _convert_="all", **kwargs)
        except InstantiationException as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, InputError):
                cause = cause.__cause__
            if isinstance(cause, InputError):
                raise cause from None
            raise InputError(f"{self.target} refuses its settings: {' '.join(str(cause).split())}") from error


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """A data set.

    Attributes
    ----------
    name : str
        For people: its name on the Hub, or that of the module that reads it.
    reader : Component
        Reads a split; its arguments are the form of the images and where they are.
    federated, train, test : str or None
        The source's splits: that the clients share, the labelled bank of the probes, the labelled test.
    limit, test_limit : int or None
        Use only so many images; None: all.
    channels, size : int
        Form of the images.
    mean, std : tuple of float
        Per channel, of pixels in [0, 1].
    num_classes : int or None
        None: as many as the labels say.
    """

    name: str
    reader: Component
    federated: str | None
    train: str | None
    test: str | None
    limit: int | None
    test_limit: int | None
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int | None

    def resized(self, size: int) -> "DataSettings":
        """The same images, brought to another height and width."""
        return replace(self, size=size, reader=Component({**self.reader.values, "size": size}))


@dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    """Who holds what.

    Attributes
    ----------
    rule : Component
        A function of `fedssl.partition`.
    num_clients, seed : int
    server_fraction : float or None
        Share of the images that the server keeps for its calibration and that are no client's; None: nothing.
    cache : str or None
        The folder for what a rule computes of the images, that of decoded ones; None: nothing is kept.
    """

    rule: Component
    num_clients: int
    seed: int
    server_fraction: float | None
    cache: str | None


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """What is trained in which round.

    Attributes
    ----------
    phases : Component
        A function of `fedssl.schedule.phases`, without its last arguments.
    rounds : int
        Of the run.
    """

    phases: Component
    rounds: int


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The method with its encoder and heads, and all that its first weights depend on."""

    encoder: Component
    method: Component
    schedule: ScheduleSettings
    seed: int


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Local training, see `fedssl.training.LocalTrainer`."""

    augmentation: Component
    optimizer: Component
    regularizer: Component
    epochs: int
    batch_size: int
    precision: str
    clip_norm: float | None
    channels_last: bool
    cuda_graphs: bool


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """How a process uses its machine; nothing of it changes a result but for rounding.

    Attributes
    ----------
    device : {"auto", "cpu", "cuda"}
    threads : int
    keep_freed_memory : bool
        Whether freed memory is kept.
    compile_encoder : bool
    """

    device: str
    threads: int
    keep_freed_memory: bool
    compile_encoder: bool


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """The aggregation algorithm.

    Attributes
    ----------
    strategy, server_optimizer : Component
    reported_metrics : tuple of str
        What clients report for the log beside what the algorithm needs.
    """

    strategy: Component
    server_optimizer: Component
    reported_metrics: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Training on the server itself.

    Attributes
    ----------
    when : {"start", "end"}
        Of every round.
    data : DataSettings
        Whose images.
    has_own_dataset : bool
        Whether they are a data set of their own; False: a share of those that clients would have.
    share : float
        Of the images.
    epochs : int
        Per round.
    """

    when: str
    data: DataSettings
    has_own_dataset: bool
    share: float
    epochs: int


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is measured of the models.

    Attributes
    ----------
    every : int
        Rounds between two evaluations; 0: only at the end.
    early_stopping : EarlyStopping
        By which of their results the run ends early.
    protocol, final_protocol : Component
        In the rounds, and at the end of the run.
    collapse_images : int
        On how many images collapse is looked for; 0: not at all.
    measure_resources : bool
        Whether FLOPs and memory of a training step are counted.
    personalized : bool
        Whether what every client would use is judged at the end.
    adaptation_epochs : int
        For how long clients train for that which never did.
    """

    every: int
    early_stopping: EarlyStopping
    protocol: Component
    final_protocol: Component
    collapse_images: int
    measure_resources: bool
    personalized: bool
    adaptation_epochs: int


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """The run folder.

    Attributes
    ----------
    folder : Path or None
        None: a new one, to be chosen.
    run_id : str
        Keeps apart what clients keep of different runs.
    resumed : int or None
        How many rounds the run in the folder was to have; None: it is a new run.
    checkpoint_every, keep_checkpoints, snapshot_every : int
    tracker : Component
        What is told of the run beside its folder, see ``conf/tracker``.
    overrides : tuple of str
        The complete words of the command line.
    choices : mapping of str to str
        The choice in every group of the configuration.
    resolved_yaml : str
        All settings, resolved, as YAML.
    """

    folder: Path | None
    run_id: str
    resumed: int | None
    checkpoint_every: int
    keep_checkpoints: int
    snapshot_every: int
    tracker: Component
    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    resolved_yaml: str


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the clients are run, see ``conf/engine``."""

    name: str
    address: str | None
    root_certificates: str | None = None
    client_cpus: int | None
    client_gpus: float | None


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """What a client must know of a run.

    Attributes
    ----------
    seed : int
    states : Path
        Where the run's clients keep what they keep, each in a folder of its own.
    partition : PartitionSettings or None
        None: all images are this client's.
    """

    seed: int
    states: Path
    data: DataSettings
    partition: PartitionSettings | None
    model: ModelSettings
    training: TrainingSettings
    strategy: Component
    machine: MachineSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run.

    Attributes
    ----------
    seed, num_clients, clients_per_round, rounds : int
    unseen_clients : int
        How many clients never train.
    reply_timeout : float
        Seconds that a round waits for the next reply.
    wire_dtype : str
        How layers travel, see `fedssl.wire.wire_format`.
    lr_schedule : Component
        A function of `fedssl.schedule.lr`, without its last arguments.
    teacher : Path or None
        The file of the encoder that the server gives to clients as a teacher; None: there is none.
    client_yaml : str
        What `fedssl.config.load.parse_client_config` makes `ClientSettings` of, for simulated clients.
    """

    seed: int
    num_clients: int
    clients_per_round: int
    rounds: int
    unseen_clients: int
    reply_timeout: float
    wire_dtype: str
    lr_schedule: Component
    data: DataSettings
    partition: PartitionSettings
    model: ModelSettings
    training: TrainingSettings
    algorithm: AlgorithmSettings
    calibration: CalibrationSettings | None
    teacher: Path | None
    aggregation: AggregationSettings
    privacy: PrivacySettings | None
    secure_aggregation: SecureAggregationSettings | None
    evaluation: EvaluationSettings
    machine: MachineSettings
    engine: EngineSettings
    recording: RecordingSettings
    client_yaml: str
