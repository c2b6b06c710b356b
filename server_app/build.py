"""Build the components of a run from its settings. Everything is validated before the first round."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.serverapp import Grid

from fedssl.arrays import Layers
from fedssl.config.device_task import make_task
from fedssl.config.load import default_unlabeled_partition, with_run_folder
from fedssl.config.settings import Settings
from fedssl.datasets.base import ImageData, load_federated
from fedssl.errors import InputError, shortened
from fedssl.logs import log
from fedssl.machine.process import configure_process
from fedssl.methods.base import SSLMethod, build_method
from fedssl.methods.unsaved_state import check_unsaved
from fedssl.model_arrays import exchanged_layers
from fedssl.partition import Partition, labeled_indices, make_partition, parameter_table
from fedssl.regularizers.base import Regularizer
from fedssl.rules import check_rules
from fedssl.schedule.lr import LRSchedule
from fedssl.schedule.phases import Phase, make_phases
from fedssl.schedule.stages import check_phases
from fedssl.step_cost import TrainingCostMeter
from fedssl.training import LocalTrainer, with_term
from fedssl.training_checks import check_encoder
from server_app.callbacks.delivery import load_signer
from server_app.collapse_monitor import CollapseMonitor, server_feature_extractor
from server_app.devices import adapt_to_edge_clients, log_devices, trains_all_clients
from server_app.evaluator import Evaluator
from server_app.exchanges.base import Exchange
from server_app.exchanges.secure import SecureExchange, with_largest_weight
from server_app.exchanges.virtual_time import VirtualTimeExchange, make_virtual_time, warn_of_wall_clock_deadline
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.federation import Federation, no_flops, raise_no_server_images
from server_app.initial_weights import adopt_statistics, load_teacher, warn_of_late_starts, warn_of_random_weights
from server_app.messaging import ActivityHook
from server_app.nodes import ClientDirectory, NodeNames, discover_clients, no_registered_names
from server_app.policies import make_policy
from server_app.round import Round
from server_app.rules import RUN_RULES, SETTINGS_RULES, round_rules
from server_app.update_memory import check_models_fit, check_updates_fit
from strategies.base import make_strategy
from strategies.mods import make_mods
from strategies.rules import RunParts
from strategies.run_context import RunContext
from strategies.types import ServerState


@dataclass(frozen=True)
class ClientData:
    """Images of all simulated clients together, and their partition."""

    image_data: ImageData
    partition: Partition
    few_images: frozenset[int] = frozenset()  # clients with too few images, which never train
    # Parameters of the feature shift of every client, with a header; empty without one.
    shifts: Sequence[Sequence[str]] = ()

    @property
    def parts(self) -> list[np.ndarray]:
        return self.partition.client_indices


@dataclass(frozen=True, kw_only=True)
class RunComponents:
    """Validated components of a run; ``monitor`` and ``costs`` are None if they are turned off."""

    federation: Federation
    client_data: ClientData | None  # None if clients are edge clients, whose images are local
    evaluator: Evaluator
    monitor: CollapseMonitor | None
    costs: TrainingCostMeter | None
    make_exchange: Callable[[Grid, ActivityHook], Exchange]  # the hook is called by exchanges with devices

    @property
    def context(self) -> RunContext:
        return self.federation.context

    @property
    def settings(self) -> Settings:
        return self.context.settings

    @property
    def method(self) -> SSLMethod:
        return self.context.method

    def in_folder(self, folder: Path, *, paths: Mapping[str, str] | None = None) -> "RunComponents":
        """Return the components of a run in this folder. ``paths`` are as in `fedssl.config.load.with_run_folder`."""
        settings = self.settings
        recording = with_run_folder(settings, folder, paths=paths).recording
        settings = replace(settings, recording=recording)
        client_config = self.context.client_config if self.context.is_deployment else settings.client_yaml
        context = replace(self.context, settings=settings, client_config=client_config)
        return replace(self, federation=replace(self.federation, context=context))


def build_run(grid: Grid, settings: Settings, *, known_client_ids: Mapping[str, int] | None = None) -> RunComponents:
    """Build and validate all components. ``known_client_ids`` are the ids of edge clients of a resumed run."""
    clients = discover_clients(
        grid,
        settings.num_clients,
        timeout=settings.reply_timeout,
        known_client_ids=known_client_ids,
        node_names=node_names(settings),
    )
    return build_components(settings, clients)


def build_components(settings: Settings, clients: ClientDirectory, *, reads_images: bool = True) -> RunComponents:
    """Build and validate all components of a run with these clients. Nothing is sent to them.

    Without ``reads_images`` nothing that needs the server's images can be used.
    """
    device = configure_process(settings.machine)
    warn_of_random_weights(settings)
    settings = adopt_statistics(settings)
    task = make_task(settings).text() if clients.client_ids else None
    # The noise of privacy=central is for a fixed number of clients.
    trains_new_devices = bool(task) and trains_all_clients(settings) and settings.privacy is None
    if task:
        settings = adapt_to_edge_clients(settings, clients)
        log_devices(settings, clients)
    data = settings.data
    evaluator = Evaluator(settings.evaluation, data=data, rounds=settings.rounds, device=device, seed=settings.seed)
    context = make_context(settings, device, client_config=task)
    method = context.method
    check_unsaved(settings.model.encoder, method.encoder)
    strategy = make_strategy(settings.algorithm.strategy)
    load_images = functools.cache(partial(load_client_images, settings, method))
    parts = RunParts(
        context=context,
        strategy=strategy,
        regularizer=with_term(settings.training.regularizer.make(Regularizer), strategy.client.term),
        has_labels=lambda: load_images().labels is not None,
        result_units=evaluator.result_units if reads_images else None,
    )
    check_encoder(method.encoder, (data.channels, data.size, data.size))
    check_rules(RUN_RULES, parts)
    client_data = None
    untrained = frozenset(range(settings.num_clients - settings.unseen_clients, settings.num_clients))
    if not task:
        settings, client_data = make_client_data(settings, method, load_images())
        untrained |= client_data.few_images
    context = replace(context, untrained_clients=untrained)
    strategy.server.prepare(context)
    per_round = min(settings.clients_per_round, settings.num_clients - len(untrained))
    training = LocalTrainer.build(settings.training, method, term=strategy.client.term)
    if reads_images:
        evaluator.validate(method.encoder)
        if task and settings.engine.deliver_every is not None:
            load_signer(settings.engine)  # raises an error before the folder is made
    images = None
    if client_data is not None:
        images = [len(part) for client, part in enumerate(client_data.parts) if client not in untrained]
    settings = with_largest_weight(settings, strategy, images=images)
    context = replace(context, settings=settings, clients_per_round=per_round)
    mods = make_mods(context if reads_images else replace(context, settings=replace(settings, calibration=None)))
    costs = make_costs(context, training, client_data, strategy.client.trainings_per_round)
    federation = Federation(
        context=context,
        strategy=strategy,
        directory=clients,
        policy=make_policy(settings.aggregation),
        round_rules=round_rules(settings, mods),
        mods=mods,
        extract_features=make_feature_extractor(context, strategy.server.num_comparison_images if reads_images else 0),
        trains_new_devices=trains_new_devices,
        client_flops=no_flops if costs is None else costs.client_flops,
    )
    check_federation(federation, runs_here=reads_images)
    return RunComponents(
        federation=federation,
        client_data=client_data,
        evaluator=evaluator,
        monitor=make_monitor(context, training) if reads_images else None,
        costs=costs,
        make_exchange=exchange_maker(context, costs),
    )


def check_federation(federation: Federation, *, runs_here: bool) -> None:
    """Raise `InputError` for an exchange that rules refuse, and for models that do not fit into memory or on disk."""
    if federation.round_rules:
        Round(federation.without_training(), ServerState())
    layers = exchanged_layers(federation.context.method)
    if runs_here:
        check_updates_fit(federation, layers)
    if runs_here and federation.settings.recording.resumed is None:  # else models are on the disk already
        check_models_fit(federation, layers)


def make_context(settings: Settings, device: torch.device, *, client_config: str | None) -> RunContext:
    """Return the facts of a run, with its method; ``client_config`` is that of edge clients, None in a simulation."""
    check_rules(SETTINGS_RULES, settings)
    method = build_method(settings.model).to(device)
    lr_schedule = make_lr_schedule(settings, method)
    load_teacher(method, settings)
    warn_of_late_starts(method, settings.rounds)
    return RunContext(
        settings=settings,
        method=method,
        phases=lr_schedule.phases,
        clients_per_round=settings.clients_per_round,
        client_config=client_config or settings.client_yaml,
        lr_factor=lr_schedule,
        device=device,
        is_deployment=client_config is not None,
    )


def make_client_data(settings: Settings, method: SSLMethod, image_data: ImageData) -> tuple[Settings, ClientData]:
    """Return the images of simulated clients, and the settings with the partition of images without labels."""
    if image_data.labels is None:
        settings = default_unlabeled_partition(settings)
    partition = make_partition(settings.partition, image_data)
    if method.uses_labels:
        partition = replace(partition, client_indices=labeled_indices(partition.client_indices, image_data.labels))
    few_images = clients_with_few_images(settings, partition.client_indices, method)
    return settings, ClientData(
        image_data,
        partition,
        few_images,
        parameter_table(settings.partition, channels=settings.data.channels),
    )


def exchange_maker(context: RunContext, costs: TrainingCostMeter | None) -> Callable[[Grid, ActivityHook], Exchange]:
    """Return the function that makes the exchange of the run."""
    settings, virtual = context.settings, make_virtual_time(context)
    if virtual is None and not context.is_deployment:
        warn_of_wall_clock_deadline(settings)

    def make(grid: Grid, on_activity: ActivityHook) -> Exchange:
        if secure := SecureExchange.of(grid, settings, on_activity=on_activity):
            return secure
        if virtual is None:
            return WallClockExchange(grid, keep_contents=settings.aggregation.buffered, on_activity=on_activity)
        if virtual.is_in_seconds and costs is not None:
            # With the initial weights also in a resumed run: a solver's number of iterations may depend on them.
            for phase in context.phases:
                costs.step(phase)
        return VirtualTimeExchange(grid, virtual)

    return make


def node_names(settings: Settings) -> NodeNames:
    """Return the function that requests registered names from the SuperLink, if it is on this machine."""
    if settings.engine.name != "deployment":
        return no_registered_names
    from fedssl.fleet.address import check_address, is_loopback  # slow imports
    from fedssl.fleet.control import registered_names

    if not is_loopback(check_address("engine.address", str(settings.engine.address))[0]):
        log.warning("names of devices are not bound to keys: the SuperLink is on another machine")
        return no_registered_names
    return partial(registered_names, settings.engine)


def make_lr_schedule(settings: Settings, method: SSLMethod) -> LRSchedule:
    """Return the phases and the learning rates; raises `InputError` if the encoder does not allow them."""
    encoder = method.encoder
    phases: Sequence[Phase] = make_phases(
        settings.model.schedule, stages=len(encoder.stage_names), frozen=encoder.frozen_stages
    )
    check_phases(method, phases)
    lr_schedule = LRSchedule(settings.lr_schedule.instantiate(), phases, settings.rounds)
    lr_schedule(1)  # validates its settings
    return lr_schedule


def make_costs(
    context: RunContext, training: LocalTrainer, client_data: ClientData | None, trainings_per_round: int
) -> TrainingCostMeter | None:
    """Return the meter of costs; None if it is turned off, or the clients' images are unknown."""
    if client_data is None or not context.settings.evaluation.measure_resources:
        return None
    return TrainingCostMeter(
        context.method,
        training,
        image_data=client_data.image_data,
        parts=client_data.parts,
        device=context.device,
        trainings_per_round=trainings_per_round,
    )


def make_monitor(context: RunContext, training: LocalTrainer) -> CollapseMonitor | None:
    """Return the collapse monitor; None if it is turned off."""
    settings = context.settings
    num_images = settings.evaluation.collapse_images
    if not num_images:
        return None
    return CollapseMonitor(
        context.method,
        data=settings.data,
        num_images=num_images,
        augment=training.augment,
        device=context.device,
        seed=settings.seed,
    )


def make_feature_extractor(context: RunContext, num_images: int) -> Callable[[Layers], torch.Tensor]:
    """Return the extractor of features of ``num_images`` server images, if the strategy compares models."""
    if not num_images:
        return raise_no_server_images
    settings = context.settings
    return server_feature_extractor(
        context.method, data=settings.data, num_images=num_images, device=context.device, seed=settings.seed
    )


def load_client_images(settings: Settings, method: SSLMethod) -> ImageData:
    """Load the images of all clients; raises `InputError` if the method needs labels and they have none."""
    image_data = load_federated(settings.data)
    if method.uses_labels and image_data.labels is None:
        raise InputError(
            f"{type(method).__name__} needs labels but the images of dataset.splits.federated="
            f"{settings.data.federated} have none; choose another dataset, split or method"
        )
    return image_data


def clients_with_few_images(settings: Settings, parts: Sequence[np.ndarray], method: SSLMethod) -> frozenset[int]:
    """Return the clients with too few images, and log them; `InputError` if the others are too few for a round."""
    smallest, needed = method.min_batch_size, settings.aggregation.min_updates
    few = np.flatnonzero(np.fromiter(map(len, parts), np.int64, len(parts)) < smallest).tolist()
    unseen = settings.unseen_clients
    num_others = len(set(range(len(parts) - unseen)).difference(few))
    if num_others < needed:
        most = sum(map(len, parts)) // smallest  # clients that could have enough images
        raise InputError(
            f"{num_others or 'no'} client{'s have' if num_others > 1 else ' has'} the {smallest} images that "
            f"{type(method).__name__} needs, and aggregation.min_updates={needed} with num_clients={len(parts)}; "
            + (f"set partition=iid and num_clients={most} or lower" if most - unseen >= needed else "add images")
        )
    if few:
        log.warning(
            "%d of %d clients never train, since %s needs at least %d images: %s",
            *(len(few), len(parts), type(method).__name__, smallest, shortened(few, maximum=8)),
        )
    return frozenset(few)
