"""Typed settings of a run, one frozen dataclass for each part of the program. `fedssl.config.load` creates them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedssl.config.aggregation_settings import AggregationSettings, PrivacySettings, SecureAggregationSettings
from fedssl.config.component import Component
from fedssl.config.statistics_settings import StatisticsSettings
from fedssl.errors import InputError

# Settings of a simulated client, without engine, evaluation and tracking.
CLIENT_SETTINGS = [
    *("seed", "num_clients", "rounds", "dataset", "imbalance", "feature_shift", "partition", "augmentation", "encoder"),
    *("method", "regularizer", "tuning", "schedule", "calibration", "optimizer", "strategy"),
    *("local_epochs", "batch_size", "clip_norm"),
    *("precision", "channels_last", "gpu_augmentation", "cuda_graphs", "compile"),
    *("device", "threads", "keep_freed_memory", "output_dir", "run_id"),
]

# Settings of ``conf/encoder`` that only the server reads.
SERVER_ENCODER_KEYS = ("weights",)

# Settings that a resumed run may change, because they decide which clients a round may lose.
_GRAPH = ("dropout_fraction", "corrupted_fraction", "security_bits", "correctness_bits", "neighbors", "threshold")
DROPOUT_KEYS = {
    "aggregation.round_deadline",
    "aggregation.max_retries",
    *(f"secure_aggregation.{name}" for name in _GRAPH),
}


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Data set."""

    name: str  # display name: that of the Hub, or of the module that reads it
    reader: Component  # of a split; its arguments are the location and the shape of the images
    federated: str | None  # name of the source's split with the clients' images
    train: str | None  # name of the split with labeled training images of evaluations
    test: str | None  # name of the split with labeled test images of evaluations
    limit: int | None  # maximum number of images; None uses all
    test_limit: int | None  # maximum number of images; None uses all
    channels: int
    size: int
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]  # per channel, of pixels in [0, 1]
    num_classes: int | None  # None counts the labels
    held_out: tuple[str, ...] = ()  # domains that only the test has, see `fedssl.datasets.holdout`

    def resized(self, size: int) -> "DataSettings":
        """Return the settings of the same images with another height and width."""
        return replace(self, size=size, reader=Component({**self.reader.values, "size": size}))


def check_channels(dataset: DataSettings | DictConfig) -> None:
    """Raise `InputError` unless a data set has a mean and a standard deviation for each channel."""
    for name, values in (("mean", dataset.mean), ("std", dataset.std)):
        if len(values) != dataset.channels:
            raise InputError(
                f"dataset.{name}={list(values)} has {len(values)} numbers but dataset.channels={dataset.channels}; set "
                f"one number per channel, or one for all, such as dataset.{name}=[{values[0]}]"
            )


def statistic_of_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a mean or standard deviation for a number of channels: if it is another one, all have the mean."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels


@dataclass(frozen=True, kw_only=True)
class FeatureShift:
    """Strengths of the differences between the images of clients, see `fedssl.partition.feature_shift`; 0: none."""

    brightness: float = 0.0
    contrast: float = 0.0
    color: float = 0.0
    blur: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    """Partition of the images among clients, by a function of `fedssl.partition`."""

    rule: Component
    num_clients: int
    seed: int
    server_fraction: float | None  # of the images, which only the server holds, for calibration; None: none
    cache: str | None  # folder for what a partition function computes from the images; None disables it
    imbalance: float = 1.0  # size of the first class divided by that of the last; 1: all images of all classes
    feature_shift: FeatureShift = FeatureShift()


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Training schedule: a function of `fedssl.schedule.phases`, and the rounds of the run."""

    phases: Component
    rounds: int


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Method with encoder and heads, and everything that determines its initial weights."""

    encoder: Component
    tuning: Component
    method: Component
    schedule: ScheduleSettings
    seed: int
    weights: str | None = None  # source of the encoder's initial weights, of the server alone; None: random


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
    cuda_graphs: bool | None  # None: where possible


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """Use of the hardware. It changes results at most by rounding."""

    device: str
    threads: int
    keep_freed_memory: bool
    compile_encoder: bool


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Aggregation algorithm, and the metrics that clients report for the log beyond those that it needs."""

    strategy: Component
    server_optimizer: Component
    model_average: Component
    reported_metrics: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Training on the server (calibration)."""

    when: str  # "start" or "end": before or after the aggregation of every round
    data: DataSettings
    has_own_dataset: bool  # whether the data set is separate; otherwise the server holds a fraction of the run's images
    share: float  # of the images
    epochs: int  # per round


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Settings of early stopping."""

    monitor: str | None = None  # name of a result of ``evaluation``; higher is better. None disables early stopping
    # Number of consecutive evaluations without improvement after which the run ends, at least 1; None: unlimited.
    patience: int | None = None
    # Minimum increase over the best result that counts as an improvement; at least 0, in the unit of the result
    # (accuracies are in [0, 1]).
    min_delta: float = 0.0
    threshold: float | None = None  # the run ends when the result reaches this value; None: no threshold

    def __post_init__(self) -> None:
        has_criterion = self.patience is not None or self.threshold is not None
        if self.monitor is None and has_criterion:
            raise InputError(
                "early_stopping has a criterion but no monitor; set e.g. early_stopping.monitor=knn, or set "
                "early_stopping.patience and early_stopping.threshold to null"
            )
        if self.monitor is not None and not has_criterion:
            raise InputError(
                f"early_stopping.monitor={self.monitor} needs a criterion; set early_stopping.patience=3 or "
                "early_stopping.threshold=0.5"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Evaluation and measurements."""

    every: int  # rounds between two evaluations; 0 evaluates only at the end
    early_stopping: EarlyStopping
    protocol: Component
    final_protocol: Component
    collapse_images: int  # number of images for collapse metrics; 0 disables them
    measure_resources: bool  # whether to measure FLOPs and memory of a training step
    personalized: bool  # whether to evaluate the personalized model of every client at the end
    adaptation_epochs: int  # epochs that unseen clients train before that


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """The run folder."""

    folder: Path | None  # None creates a new one
    run_id: str  # separates client states of different runs
    resumed: int | None  # total rounds of the run that is resumed; None for a new run
    checkpoint_every: int
    keep_checkpoints: int
    snapshot_every: int
    max_state_bytes: int | None  # of all client states
    tracker: Component
    overrides: tuple[str, ...]
    choices: Mapping[str, str]  # choice of every config group
    config: DictConfig  # resolved config, from which the settings were made; read-only


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Engine that runs the clients, see ``conf/engine``."""

    name: str
    address: str | None = None
    root_certificates: str | None = None
    client_cpus: int | None = None
    client_gpus: float | None = None
    deliver_every: int | None = None  # rounds between two deliveries of the encoder to devices; 0: only at the end
    signing_key: str | None = None  # file; None: deliveries are not signed
    signing_certificate: str | None = None  # file


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Settings of a client."""

    seed: int
    states: Path  # folder of the client states, with a subfolder for each client
    base_folders: tuple[Path, ...]  # folders of base layers; new ones are stored in the first
    data: DataSettings
    partition: PartitionSettings | None  # None if the client holds all images
    model: ModelSettings
    training: TrainingSettings
    strategy: Component
    machine: MachineSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run."""

    seed: int
    num_clients: int
    clients_per_round: int
    rounds: int
    unseen_clients: int  # number of clients that never train
    pause_after: int | None  # round after which the run ends, to be resumed later; None: it runs all rounds
    reply_timeout: float  # seconds to wait for the next reply
    wire_dtype: str  # dtype of exchanged layers, see `fedssl.wire.wire_format`
    lr_schedule: Component  # function of `fedssl.schedule.lr`, with its last arguments left open
    data: DataSettings
    partition: PartitionSettings
    model: ModelSettings
    training: TrainingSettings
    algorithm: AlgorithmSettings
    calibration: CalibrationSettings | None
    statistics: StatisticsSettings
    teacher: Path | None  # encoder file that the server sends to clients as a teacher; None for none
    aggregation: AggregationSettings
    privacy: PrivacySettings | None
    secure_aggregation: SecureAggregationSettings | None
    availability: Component  # model of `fedssl.availability`, with its last arguments left open
    client_speed: Component  # as availability
    evaluation: EvaluationSettings
    machine: MachineSettings
    engine: EngineSettings
    recording: RecordingSettings

    @property
    def client_yaml(self) -> str:
        """Return the source of `ClientSettings` for simulated clients, see `fedssl.config.load.parse_client_config`."""
        config = OmegaConf.masked_copy(self.recording.config, CLIENT_SETTINGS)
        config.encoder = {key: value for key, value in config.encoder.items() if key not in SERVER_ENCODER_KEYS}
        return OmegaConf.to_yaml(config)
