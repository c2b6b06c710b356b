"""The cost of a run before it starts.

Steps and bytes are counted (`simulation.cost_counts`). Seconds and memory are composed of measured parts
(`simulation.cost_measurement`). A run that needs more memory than is available is rejected, with settings that fit.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from client_app.step_memory import estimate_step_memory
from fedssl.config.load import load_settings, parse_client_config, with_run_folder
from fedssl.config.settings import Settings
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from fedssl.machine.devices import is_gpu
from fedssl.machine.memory import available_memory, gigabytes, resident_memory
from fedssl.machine.process import available_cores
from fedssl.training import number_of_batches
from server_app.build import RunComponents, build_run
from server_app.training_loop import can_evaluate_in_background
from simulation.cost_counts import RoundCounts, count_rounds, why_upper_bound
from simulation.cost_measurement import MAX_UPDATES, Measurement, measure, parallel_slowdown
from simulation.grid import LocalGrid, load_client_app
from simulation.resources import RAY_OVERHEAD_SECONDS, EngineChoice, auto_engine

log = logging.getLogger("fedssl")

# Settings that change the counts of a run but not the duration of its parts, and those of its folder.
_NOT_MEASURED = {
    *("seed", "partition", "num_clients", "clients_per_round", "unseen_clients", "rounds", "local_epochs"),
    *("output_dir", "run_id"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimated cost of a run."""

    engine: EngineChoice
    num_clients: int
    rounds: Sequence[RoundCounts]
    upper_bounds: Sequence[str]  # settings by which the run may need less
    round_seconds: Sequence[float]
    seconds: float  # without the start of the process
    step_memory: int | None  # peak bytes of tensors of a training step; None if not measured
    server_memory: int  # peak bytes of the process, with clients on engine=local
    worker_memory: int  # peak bytes of each process for clients; 0 on engine=local

    @property
    def memory(self) -> int:
        """Return the peak bytes of all processes."""
        return self.server_memory + self.engine.concurrency * self.worker_memory


class Planner:
    """Estimates costs of runs. Runs that differ only in counts share their measurements."""

    def __init__(self) -> None:
        self._measurements: dict[tuple[object, ...], Measurement] = {}
        self._slowdowns: dict[tuple[int, int], float] = {}

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the cost of a run with these overrides; raises `InputError` if it is invalid or does not fit."""
        start = time.perf_counter()
        settings = _with_folder(load_settings(overrides))
        _check_settings(settings)
        log.disabled = True  # warnings are logged by the run
        try:
            components = build_run(LocalGrid(load_client_app(), num_clients=settings.num_clients), settings)
            build = time.perf_counter() - start
            _check_step_memory(components)
            key = _measurement_key(components)
            if key not in self._measurements:
                self._measurements[key] = measure(components)
        finally:
            log.disabled = False
        engine = choose_engine(settings)
        plan = make_plan(components, self._measurements[key], engine, build=build, slowdown=self.slowdown)
        _check_memory(plan, settings)
        return plan

    def slowdown(self, processes: int, threads: int) -> float:
        """Return how much slower each of several concurrent processes with some threads computes than one alone."""
        if processes < 2:
            return 1.0
        if (processes, threads) not in self._slowdowns:
            self._slowdowns[processes, threads] = parallel_slowdown(processes, threads)
        return self._slowdowns[processes, threads]


def choose_engine(settings: Settings) -> EngineChoice:
    """Return the engine of a run and the number of clients that train at once."""
    if settings.engine.name == "auto":
        return auto_engine(settings)
    if settings.engine.name == "local":
        return EngineChoice("local", 1, "")
    cpus = settings.engine.client_cpus or settings.machine.threads
    return EngineChoice("ray", max(1, min(available_cores() // cpus, settings.clients_per_round)), "")


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
    rounds, num_models = count_rounds(components, saves_state=measured.state_bytes > 0)
    on_ray = engine.engine == "ray"
    concurrency = engine.concurrency if on_ray else 1
    background = can_evaluate_in_background(components, concurrency * settings.machine.threads)
    factor = slowdown(concurrency, settings.machine.threads)
    steps = _step_seconds(components, rounds, measured.step)
    calibration = _calibration_steps(components)
    round_seconds = []
    for counts, step in zip(rounds, steps, strict=True):
        client = measured.client + counts.steps / counts.clients * step
        training = -(-counts.clients // concurrency) * client * factor
        seconds = training + counts.clients * measured.update + calibration * step
        if counts.evaluated:
            seconds += (counts.clients + 1) * measured.observation
            seconds += max(0.0, measured.evaluation - training) if background else measured.evaluation
        round_seconds.append(seconds)
    model_bytes = sum(array.nbytes for array in components.context.initial_model().layers.values())
    server = measured.server_memory if on_ray else measured.peak_memory
    server += max(0, settings.clients_per_round - MAX_UPDATES) * measured.update_memory
    server += (num_models - 1) * model_bytes
    if not on_ray:  # recent states are cached
        server += min(settings.num_clients * measured.state_bytes, (available_memory() or 2**33) // 8)
    costs = components.costs(rounds[-1].phase, [0]) if components.costs else None
    return Plan(
        engine=EngineChoice(engine.engine, concurrency, engine.reason),
        num_clients=settings.num_clients,
        rounds=rounds,
        upper_bounds=why_upper_bound(components),
        round_seconds=round_seconds,
        seconds=build + sum(round_seconds) + measured.finish + on_ray * RAY_OVERHEAD_SECONDS,
        step_memory=int(costs["peak_memory"]) if costs else None,
        server_memory=server,
        worker_memory=measured.worker_memory if on_ray else 0,
    )


def _step_seconds(components: RunComponents, rounds: Sequence[RoundCounts], first: float) -> list[float]:
    """Return the seconds of a step in every round: proportional to its FLOPs, which depend on the phase."""
    if components.costs is None or len(components.context.phases) == 1:
        return [first] * len(rounds)
    flops = [components.costs(counts.phase, [0])["flops_per_image"] for counts in rounds]
    return [first * number / flops[0] for number in flops]


def _calibration_steps(components: RunComponents) -> int:
    """Return the steps of the server's own training in a round."""
    calibration = components.settings.calibration
    if calibration is None:
        return 0
    num_images = int(len(load_federated(calibration.data).images) * calibration.share)
    return calibration.epochs * number_of_batches(num_images, components.settings.training.batch_size)


def _with_folder(settings: Settings) -> Settings:
    """Return settings with the run folder that a run would use: its path is sent to simulated clients."""
    folder = settings.recording.folder or Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    return with_run_folder(settings, folder)


def _check_settings(settings: Settings) -> None:
    """Raise `InputError` if the cost of a run cannot be estimated."""
    if settings.recording.resumed is not None:
        raise InputError("plan=true estimates a new run; leave out resume")
    if settings.engine.name == "deployment":
        raise InputError(
            "plan=true cannot estimate engine=deployment, because the images of devices are unknown; set engine=auto "
            "for a simulation"
        )
    if settings.engine.address is not None:
        raise InputError("plan=true estimates a run on this machine; leave out engine.address")
    if settings.secure_aggregation is not None:
        raise InputError("plan=true cannot estimate the messages of secure_aggregation; set secure_aggregation=none")


def _check_step_memory(components: RunComponents) -> None:
    """Raise `InputError` if a training step does not fit into memory, before it is measured."""
    settings = components.settings
    batch_size, available = _batch_size(components, max), available_memory()
    if is_gpu(components.device) or available is None:
        return
    needed = estimate_step_memory(parse_client_config(settings.client_yaml))
    if needed.of_batch(batch_size) <= available:
        return
    largest = needed.largest_batch(available)
    remedy = f"batch_size={largest} fits" if largest > 1 else "choose a smaller encoder or smaller images"
    raise InputError(
        f"a training step with {batch_size} images needs about {gigabytes(needed.of_batch(batch_size))} of memory, and "
        f"{gigabytes(available)} are available; {remedy}"
    )


def _check_memory(plan: Plan, settings: Settings) -> None:
    """Raise `InputError` if a run does not fit into memory."""
    available = available_memory(reusable=resident_memory())
    if available is None or plan.memory <= available:
        return
    fitting = (available - plan.server_memory) // plan.worker_memory if plan.worker_memory else 0
    if fitting > 0:
        remedy = f"engine.client_cpus={available_cores() // fitting} runs {fitting} clients at once, which fit"
    elif plan.worker_memory:
        remedy = "set engine=local"
    else:
        remedy = f"clients_per_round={settings.clients_per_round} or the models of the strategy are too many; lower it"
    raise InputError(
        f"the run needs {gigabytes(plan.memory)} of memory, and {gigabytes(available)} are available; {remedy}"
    )


def _measurement_key(components: RunComponents) -> tuple[object, ...]:
    """Return what the measured parts of a run depend on."""
    settings = components.settings
    config: Any = OmegaConf.to_container(settings.recording.config)
    config = {key: value for key, value in config.items() if key not in _NOT_MEASURED}
    config["optimizer"].pop("lr", None)
    updates = min(settings.clients_per_round, MAX_UPDATES)
    return json.dumps(config, sort_keys=True), _batch_size(components, median), updates


def _batch_size(components: RunComponents, of_clients: Callable[[Iterable[int]], float]) -> int:
    """Return the images of a batch of the client with the maximum or the median number of images."""
    assert components.client_data is not None
    size = int(of_clients(map(len, components.client_data.parts)))
    return -(-size // number_of_batches(size, components.settings.training.batch_size))
