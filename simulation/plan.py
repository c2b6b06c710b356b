"""The cost of a run before it starts.

Steps and bytes are counted (`simulation.cost_counts`). Seconds and memory are composed of measured parts
(`simulation.cost_measurement`). A run that needs more memory than is available is rejected, with settings that fit.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from fedssl.config.load import load_settings, with_run_folder
from fedssl.config.settings import Settings
from fedssl.datasets.base import load_federated
from fedssl.machine.devices import count_accelerators
from fedssl.machine.memory import available_memory
from fedssl.machine.process import available_cores
from fedssl.training import number_of_batches
from server_app.build import RunComponents, build_run
from server_app.training_loop import can_evaluate_in_background
from server_app.update_memory import stored_updates
from simulation.cost_counts import RoundCounts, batch_size, count_rounds, images_of, why_upper_bound
from simulation.cost_measurement import MAX_UPDATES, Measurement, StepSeconds, measure, parallel_slowdown
from simulation.grid import LocalGrid, load_client_app
from simulation.plan_checks import check_disk, check_memory, check_settings, check_step_memory
from simulation.resources import RAY_OVERHEAD_SECONDS, EngineChoice, Host, auto_engine, fit_clients
from strategies.update_store import memory_budget

log = logging.getLogger("fedssl")

# Settings that change the counts of a run but not the duration of its parts, and those of its folder.
_NOT_MEASURED = {
    *("seed", "partition", "num_clients", "clients_per_round", "unseen_clients", "rounds", "local_epochs"),
    *("output_dir", "run_id"),
}
SIMILAR_IMAGES = 16  # batches whose sizes differ by less share a measurement, in which seconds are linear in the size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimated cost of a run."""

    engine: EngineChoice
    num_clients: int
    rounds: Sequence[RoundCounts]
    upper_bounds: Sequence[str]  # settings by which the run may need less
    assumptions: Sequence[str]  # on which the estimated time depends
    round_seconds: Sequence[float]
    seconds: float  # without the start of the process
    step_memory: int | None  # peak bytes of tensors of a training step; None if not measured
    server_memory: int  # peak bytes of the process, with clients on engine=local
    worker_memory: int  # peak bytes of each process for clients; 0 on engine=local
    disk: int  # bytes of checkpoints, client states, snapshots and encoders, and of updates beyond the memory
    states: int  # bytes of the newest states of all clients

    @property
    def memory(self) -> int:
        """Return the peak bytes of all processes."""
        return self.server_memory + self.engine.concurrency * self.worker_memory

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the steps and bytes in total, and the memory."""
        return sum(one.steps for one in self.rounds), sum(one.bytes for one in self.rounds), self.memory


class Planner:
    """Estimates costs of runs. Runs that differ only in counts share their measurements."""

    def __init__(self) -> None:
        self._measurements: dict[tuple[object, ...], tuple[float, Measurement]] = {}
        self._slowdowns: dict[tuple[int, int], float] = {}

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the cost of a run with these overrides; raises `InputError` if it is invalid or does not fit."""
        start = time.perf_counter()
        settings = _with_folder(load_settings(overrides))
        check_settings(settings)
        log.disabled = True  # warnings are logged by the run
        try:
            components = build_run(LocalGrid(load_client_app(), num_clients=settings.num_clients), settings)
            build = time.perf_counter() - start
            check_step_memory(components)
            engine = choose_engine(settings)
            on_ray = engine.engine == "ray"
            key = (*_measurement_key(components), on_ray)
            if key not in self._measurements:
                self._measurements[key] = build, measure(components, separate_workers=on_ray)
        finally:
            log.disabled = False
        build, measured = self._measurements[key]
        plan = make_plan(components, measured, engine, build=build, slowdown=self.slowdown)
        check_memory(plan, components)
        check_disk(plan, settings)
        return plan

    def slowdown(self, processes: int, threads: int) -> float:
        """Return how much slower each of several concurrent processes with some threads computes than one alone."""
        if processes < 2:
            return 1.0
        if (processes, threads) not in self._slowdowns:
            self._slowdowns[processes, threads] = parallel_slowdown(processes, threads)
        return self._slowdowns[processes, threads]


def choose_engine(settings: Settings) -> EngineChoice:
    """Return the engine of a run and the number of clients that train at once; raises `InputError` as the run."""
    choice = EngineChoice(settings.engine.name, settings.clients_per_round, "")
    if choice.engine == "auto":
        choice = auto_engine(settings)
    if choice.engine == "local":
        return replace(choice, concurrency=1)
    _, clients = fit_clients(
        [Host(cpus=available_cores(), gpus=count_accelerators(settings.machine.device))],
        client_cpus=settings.engine.client_cpus,
        client_gpus=settings.engine.client_gpus,
        threads=settings.machine.threads,
        max_clients=choice.concurrency,
    )
    return replace(choice, concurrency=clients)


def make_plan(
    components: RunComponents,
    measured: Measurement,
    engine: EngineChoice,
    *,
    build: float,
    slowdown: Callable[[int, int], float],
) -> Plan:
    """Compose the cost of a run. ``build`` seconds were needed to build its components.

    ``slowdown`` returns how much slower each of several concurrent processes with some threads computes.
    """
    settings = components.settings
    rounds, num_models = count_rounds(components, saves_state=measured.saves_state)
    on_ray = engine.engine == "ray"
    round_seconds = _round_seconds(components, measured, rounds, engine.concurrency, slowdown)
    evaluation, phases = measured.evaluation, len({counts.phase.number for counts in rounds})
    finish = num_models * evaluation.final + evaluation.baselines + evaluation.figures
    assumptions = {
        "evaluations are extrapolated from some of the images": evaluation.is_extrapolated,
        "without evaluate_personalized": settings.evaluation.personalized,
        "without states that client_state.max_bytes evicts": settings.recording.max_state_bytes is not None,
    }
    layers = components.context.initial_model().layers
    model_bytes = sum(array.nbytes for array in layers.values())
    stored = stored_updates(
        components.context.strategy.server,
        layers,
        rounds=settings.rounds,
        filters_norms=settings.aggregation.max_norm_ratio is not None,
    )
    number = settings.clients_per_round + settings.aggregation.over_selection
    in_file = max(0, stored.copies * number * model_bytes - memory_budget())  # updates of a round
    per_client = components.context.strategy.server.models_per_client
    # In memory, or in files: then a round needs each participant's model and its message.
    models = 2 * settings.clients_per_round if per_client else max(0, num_models - measured.models)
    further_models = models * model_bytes
    states, limit = settings.num_clients * measured.state_bytes, settings.recording.max_state_bytes
    states = states if limit is None else min(states, limit)
    server = measured.server_memory + further_models
    server += max(0, max(0, settings.clients_per_round - MAX_UPDATES) * measured.update_memory - in_file)
    server += stored.working_memory(number) - stored.working_memory(min(number, MAX_UPDATES))
    if not on_ray:  # recent states are cached
        server += min(states, (available_memory() or 2**33) // 8)
    recording, checkpoint = settings.recording, measured.checkpoint_bytes + (0 if per_client else further_models)
    versions = min(settings.rounds, recording.keep_checkpoints + 1)
    model_files = (num_models + versions * settings.clients_per_round) * model_bytes if per_client else 0
    snapshots = settings.rounds // recording.snapshot_every if recording.snapshot_every else 0
    return Plan(
        engine=engine,
        num_clients=settings.num_clients,
        rounds=rounds,
        upper_bounds=why_upper_bound(components),
        assumptions=[text for text, holds in assumptions.items() if holds],
        round_seconds=round_seconds,
        seconds=build + sum(round_seconds) + phases * measured.resources + finish + on_ray * RAY_OVERHEAD_SECONDS,
        step_memory=measured.step_memory,
        server_memory=server,
        worker_memory=measured.worker_memory if on_ray else 0,
        states=states,
        # A client has the states since the oldest checkpoint, and one before.
        disk=versions * states
        + model_files
        + min(settings.rounds, recording.keep_checkpoints) * checkpoint
        + max(checkpoint, num_models * model_bytes)  # the oldest is deleted after the newest is written; encoders
        + snapshots * (settings.clients_per_round + num_models) * model_bytes
        + in_file,
    )


def _round_seconds(
    components: RunComponents,
    measured: Measurement,
    rounds: Sequence[RoundCounts],
    concurrency: int,
    slowdown: Callable[[int, int], float],
) -> list[float]:
    """Return the seconds of every round with its evaluation, without what is evaluated while the next round runs."""
    settings, strategy = components.settings, components.context.strategy
    background = can_evaluate_in_background(components, concurrency * settings.machine.threads)
    factor = slowdown(concurrency, settings.machine.threads)
    result, pending = [], 0.0
    for number, counts in enumerate(rounds, 1):
        step = measured.steps[counts.phase.number]
        images = counts.images * settings.training.epochs * strategy.client.trainings_per_round
        client = measured.client + step.total(steps=counts.steps, images=images) / counts.clients
        seconds = -(-counts.clients // concurrency) * client * factor + counts.clients * measured.update
        seconds += _calibration_seconds(components, step)
        seconds += measured.checkpoint if number % settings.recording.checkpoint_every == 0 else 0.0
        if counts.evaluated:
            seconds += (counts.clients + counts.models) * measured.evaluation.observation
        seconds += max(0.0, pending - seconds)
        evaluation = counts.models * measured.evaluation.round if counts.evaluated else 0.0
        pending = evaluation if background and number < len(rounds) else 0.0
        result.append(seconds + evaluation - pending)
    return result


def _calibration_seconds(components: RunComponents, step: StepSeconds) -> float:
    """Return the seconds of the server's own training in a round."""
    calibration = components.settings.calibration
    if calibration is None:
        return 0.0
    num_images = int(len(load_federated(calibration.data).images) * calibration.share)
    batches = number_of_batches(num_images, components.settings.training.batch_size)
    return calibration.epochs * step.total(steps=batches, images=num_images)


def _with_folder(settings: Settings) -> Settings:
    """Return settings with the run folder that a run would use: its path is sent to simulated clients."""
    folder = settings.recording.folder or Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    return with_run_folder(settings, folder)


def _measurement_key(components: RunComponents) -> tuple[object, ...]:
    """Return what the measured parts of a run depend on."""
    settings = components.settings
    config: Any = OmegaConf.to_container(settings.recording.config)
    config = {key: value for key, value in config.items() if key not in _NOT_MEASURED}
    config["optimizer"].pop("lr", None)
    updates = min(settings.clients_per_round, MAX_UPDATES)
    sizes = (batch_size(components, images_of(components, of_clients)) for of_clients in (median, max))
    return json.dumps(config, sort_keys=True), updates, *(-(-size // SIMILAR_IMAGES) for size in sizes)
