"""What a run works with, built from the settings and found usable before any round."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.serverapp import Grid

from fedssl.arrays import Layers
from fedssl.config.device_task import task_of
from fedssl.config.load import partition_without_labels
from fedssl.config.settings import Settings
from fedssl.datasets.base import ImageData, load_federated
from fedssl.errors import InputError
from fedssl.evaluation.evaluation_input import why_not_evaluable
from fedssl.fingerprint import code_fingerprint
from fedssl.machine.process import configure_process
from fedssl.methods.base import SSLMethod
from fedssl.methods.build import build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.partition import make_partition
from fedssl.schedule.lr import LRSchedule
from fedssl.schedule.phases import Phase, make_phases
from fedssl.schedule.stages import check as check_phases
from fedssl.seeding import numpy_generator
from fedssl.training import LocalTrainer
from server_app.calibration import Calibration
from server_app.collapse_monitor import CollapseMonitor
from server_app.costs import TrainingCostMeter
from server_app.devices import adapt_to_edge_clients, log_devices
from server_app.differential_privacy import Privacy, check_model
from server_app.evaluator import Evaluator
from server_app.held import ClientData
from server_app.nodes import ClientManager, discover_clients
from server_app.represent import ServerFeatureExtractor
from server_app.round_context import RoundContext, raise_no_server_images
from server_app.stopping import validate_early_stopping
from server_app.teacher import load_teacher
from strategies.base import FedSSLStrategy, StrategyContext
from strategies.server_optimizer import ServerOptimizer

log = logging.getLogger("fedssl")


@dataclass(frozen=True, kw_only=True)
class RunComponents:
    """What a run works with, found usable before any round.

    Attributes
    ----------
    settings : Settings
        Those of the run, with what only the images could tell.
    context : RoundContext
    lr_schedule : LRSchedule
    client_manager : ClientManager
        Who is there.
    client_data : ClientData or None
        None: the images are on the devices.
    evaluator : Evaluator
    monitor : CollapseMonitor or None
        None: health is not looked at.
    costs : TrainingCostMeter or None
        None: they are not measured.
    device : torch.device
        Where the method is.
    evaluation_is_training_free : bool
        Whether rounds are judged by what frozen encoders make of images alone, and no network is trained for it.
    """

    settings: Settings
    context: RoundContext
    lr_schedule: LRSchedule
    client_manager: ClientManager
    client_data: ClientData | None
    evaluator: Evaluator
    monitor: CollapseMonitor | None
    costs: TrainingCostMeter | None
    device: torch.device
    evaluation_is_training_free: bool

    @property
    def method(self) -> SSLMethod:
        """The server's own copy, into which models are loaded to be looked at."""
        return self.context.method


def build_run(grid: Grid, settings: Settings, *, known_client_ids: Mapping[str, int] | None = None) -> RunComponents:
    """Build all parts; ``known_client_ids`` are the numbers that devices of the run have from before.

    Raises
    ------
    InputError
        Settings do not fit each other, the data or the federation.
    """
    device = configure_process(settings.machine)
    clients = discover_clients(
        grid, settings.num_clients, timeout=settings.reply_timeout, known_client_ids=known_client_ids
    )
    task = task_of(settings).text() if clients.client_ids else None
    if task:
        settings = adapt_to_edge_clients(settings, clients)
        log_devices(settings, clients)
    data = settings.data
    evaluator = Evaluator(settings.evaluation, data=data, rounds=settings.rounds, device=device, seed=settings.seed)
    method = build_method(settings.model).to(device)
    validate_batch_size(settings, method)
    results = evaluator.dry_run(method.encoder)
    strategy, server_optimizer = make_algorithm(settings, method, is_deployment=bool(task))
    method.encoder.check_image_shape((data.channels, data.size, data.size))
    validate_aggregation(settings, is_deployment=bool(task))
    client_data = None
    if task:
        validate_edge_method(method)
        forbid_personalized_evaluation(settings)
    else:
        image_data = load_client_images(settings, method)
        if image_data.labels is None:
            settings = partition_without_labels(settings)
        validate_personalized_evaluation(settings, image_data)
        client_data = ClientData(image_data, make_partition(settings.partition, image_data))
        check_clients(client_data.parts, method)
    training = LocalTrainer.build(settings.training, method)
    lr_schedule = make_lr_schedule(settings, method)
    validate_early_stopping(settings, method, result_units=results, phases=len(lr_schedule.phases))
    load_teacher(method, settings.teacher, data=data)
    context = RoundContext(
        strategy=strategy,
        method=method,
        phases=lr_schedule.phases,
        initial_arrays=lambda: exchanged_layers(build_method(settings.model)),
        nodes=clients.nodes,
        seed=settings.seed,
        clients_per_round=settings.clients_per_round,
        timeout=settings.reply_timeout,
        client_config=task or settings.client_text,
        code_fingerprint=code_fingerprint(),
        metrics=settings.algorithm.metrics,
        server_optimizer=server_optimizer,
        lr_factor=lr_schedule,
        calibration=make_calibration(settings, method, lr_schedule, device),
        aggregation=settings.aggregation,
        secure_aggregation=settings.secure_aggregation,
        privacy=make_privacy(settings, method, is_deployment=bool(task)),
        wire_dtype=settings.wire_dtype,
        unseen_clients=frozenset(range(settings.num_clients - settings.unseen_clients, settings.num_clients)),
        extract_features=make_feature_extractor(settings, method, strategy.server.num_comparison_images, device),
    )
    return RunComponents(
        settings=settings,
        context=context,
        lr_schedule=lr_schedule,
        client_manager=ClientManager(grid, clients, timeout=settings.reply_timeout),
        client_data=client_data,
        evaluator=evaluator,
        monitor=make_monitor(settings, method, training, device),
        costs=make_costs(
            settings, method, training, client_data, device, trainings_per_round=strategy.client.trainings_per_round
        ),
        device=device,
        evaluation_is_training_free=results is not None,
    )


def validate_batch_size(settings: Settings, method: SSLMethod) -> None:
    """Refuse batches of which the method learns nothing; raises `InputError`."""
    batch_size, smallest = settings.training.batch_size, method.min_batch_size
    if batch_size < smallest:
        raise InputError(
            f"batch_size={batch_size} but {type(method).__name__} learns nothing from batches of fewer than {smallest} "
            f"images; set batch_size={smallest} or more, better 64"
        )


def check_clients(parts: Sequence[np.ndarray], method: SSLMethod) -> None:
    """Tell which clients have too few images to be trained with; raises `InputError` if all have."""
    smallest = method.min_batch_size
    few = [str(client) for client, part in enumerate(parts) if len(part) < smallest]
    if len(few) == len(parts):
        raise InputError(
            f"no client has the {smallest} images that {type(method).__name__} needs at least; lower num_clients="
            f"{len(parts)}, or choose another method"
        )
    if few:
        log.warning(
            "%s learns nothing from fewer than %d images: client %s will be dropped in every round; a larger "
            "partition.min_size or fewer clients avoid it",
            *(type(method).__name__, smallest, ", ".join(few)),
        )


def validate_aggregation(settings: Settings, *, is_deployment: bool) -> None:
    """Refuse, by an `InputError`, to wait for what cannot come."""
    aggregation, asked, clients = settings.aggregation, settings.clients_per_round, settings.num_clients
    if aggregation.min_updates > asked:
        raise InputError(
            f"aggregation.min_updates={aggregation.min_updates} but clients_per_round={asked}; lower the one or raise the other"
        )
    if not is_deployment and asked + aggregation.over_selection > clients:
        raise InputError(
            f"aggregation.over_selection={aggregation.over_selection} but clients_per_round={asked} leaves {clients - asked} of "
            f"num_clients={clients}; lower one of them"
        )
    if aggregation.buffered and not is_deployment:
        raise InputError(
            "aggregation.buffered=true is for devices: the clients of a simulation are never late; set it false"
        )
    if settings.secure_aggregation and (
        settings.privacy or aggregation.buffered or aggregation.max_norm_ratio is not None
    ):
        raise InputError(
            "secure_aggregation=secagg_plus shows the server nothing but a sum; set privacy=none aggregation.buffered=false "
            "aggregation.max_norm_ratio=null, which need single updates"
        )
    if settings.secure_aggregation and settings.recording.snapshot_every:
        raise InputError("secure_aggregation=secagg_plus shows the server no client's model; set snapshot_every=0")
    if settings.privacy and settings.recording.snapshot_every:
        raise InputError(
            "privacy=central hides what a client adds, which kept models of clients show; set snapshot_every=0"
        )
    if aggregation.buffered and aggregation.over_selection:
        raise InputError(
            "aggregation.buffered=true waits for aggregation.min_updates; set aggregation.over_selection=0"
        )


def validate_edge_method(method: SSLMethod) -> None:
    """Refuse, by an `InputError`, a method that devices cannot be asked for."""
    if method.uses_labels:
        raise InputError(f"{type(method).__name__} needs labels, and devices agree on no classes; set another method")


def forbid_personalized_evaluation(settings: Settings) -> None:
    """Refuse, by an `InputError`, to look at what only clients of a simulation show."""
    if settings.evaluation.personalized or settings.unseen_clients:
        raise InputError(
            "evaluate_personalized and unseen_clients are for simulations: what a device uses itself stays on it; set "
            "evaluate_personalized=false unseen_clients=0"
        )


def validate_personalized_evaluation(settings: Settings, image_data: ImageData) -> None:
    """Refuse, by an `InputError`, to judge clients' encoders without labels."""
    problem = why_not_evaluable(settings.data)
    if settings.evaluation.personalized and (problem or image_data.labels is None):
        raise InputError(f"evaluate_personalized=true needs labels; {problem or 'the images of the clients have none'}")


def make_algorithm(
    settings: Settings, method: SSLMethod, *, is_deployment: bool
) -> tuple[FedSSLStrategy, ServerOptimizer]:
    """The strategy and the server optimiser, which must be able to work here; raises `InputError`."""
    strategy: FedSSLStrategy = settings.algorithm.strategy.make()
    server_optimizer: ServerOptimizer = settings.algorithm.server_optimizer.make()
    strategy.validate(
        StrategyContext(
            method=method,
            clients_per_round=settings.clients_per_round,
            num_clients=settings.num_clients,
            num_unseen_clients=settings.unseen_clients,
            rounds=settings.rounds,
            seed=settings.seed,
            is_deployment=is_deployment,
            server_has_images=settings.data.train is not None,
            has_calibration=settings.calibration is not None,
            server_optimizer=server_optimizer.is_active,
        )
    )
    return strategy, server_optimizer


def make_lr_schedule(settings: Settings, method: SSLMethod) -> LRSchedule:
    """The phases and the learning rates, which the method's encoder must allow; raises `InputError`."""
    phases: Sequence[Phase] = make_phases(settings.model.schedule, stages=len(method.encoder.stage_names))
    check_phases(method, phases)
    lr_schedule = LRSchedule(settings.lr_schedule.make(), phases, settings.rounds)
    lr_schedule(1)  # refuses its settings now or never
    return lr_schedule


def make_calibration(
    settings: Settings, method: SSLMethod, lr_schedule: LRSchedule, device: torch.device
) -> Calibration | None:
    """The server's own training, with an optimiser of its own; None: there is none."""
    if settings.calibration is None:
        return None
    return Calibration(
        settings.calibration,
        method=method,
        training=LocalTrainer.build(settings.training, method),
        lr_schedule=lr_schedule,
        data=settings.data,
        device=device,
        seed=settings.seed,
    )


def make_costs(
    settings: Settings,
    method: SSLMethod,
    training: LocalTrainer,
    client_data: ClientData | None,
    device: torch.device,
    *,
    trainings_per_round: int,
) -> TrainingCostMeter | None:
    """What measures the costs; None: it is turned off, or nobody knows the clients' images."""
    if client_data is None or not settings.evaluation.measure_resources:
        return None
    return TrainingCostMeter(
        method,
        training,
        image_data=client_data.image_data,
        parts=client_data.parts,
        device=device,
        trainings_per_round=trainings_per_round,
    )


def make_privacy(settings: Settings, method: SSLMethod, *, is_deployment: bool) -> Privacy | None:
    """What adds noise; None: nothing. In a simulation, whose numbers are to repeat, the noise comes from the seed."""
    if settings.privacy is None:
        return None
    check_model(method)
    if settings.aggregation.max_norm_ratio is not None:
        raise InputError(
            "aggregation.max_norm_ratio lets clients decide on each other, which privacy=central does not count; set "
            "aggregation.max_norm_ratio=null"
        )

    def generator(round: int) -> np.random.Generator:
        return np.random.default_rng() if is_deployment else numpy_generator(settings.seed, "noise", round)

    return Privacy(settings.privacy, clients=settings.clients_per_round, generator=generator)


def make_monitor(
    settings: Settings, method: SSLMethod, training: LocalTrainer, device: torch.device
) -> CollapseMonitor | None:
    """The monitor of health; None: it is turned off."""
    num_images = settings.evaluation.collapse_images
    if not num_images:
        return None
    return CollapseMonitor(
        method, data=settings.data, num_images=num_images, augment=training.augment, device=device, seed=settings.seed
    )


def make_feature_extractor(
    settings: Settings, method: SSLMethod, num_images: int, device: torch.device
) -> Callable[[Layers], torch.Tensor]:
    """What compares models on so many of the server's images, if the algorithm asks for any."""
    if not num_images:
        return raise_no_server_images
    return ServerFeatureExtractor(method, data=settings.data, num_images=num_images, device=device, seed=settings.seed)


def load_client_images(settings: Settings, method: SSLMethod) -> ImageData:
    """What the clients share; raises `InputError` if the method needs labels that are not there."""
    image_data = load_federated(settings.data)
    if method.uses_labels and image_data.labels is None:
        raise InputError(
            f"{type(method).__name__} needs labels but the images of dataset.splits.federated="
            f"{settings.data.federated} have none; choose another dataset, split or method"
        )
    return image_data
