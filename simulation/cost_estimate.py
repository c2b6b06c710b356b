"""The cost of a run before it starts: counted steps and bytes, and measured parts that are multiplied.

A run in which clients fail, or that ends early, needs less.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedssl.config.load import load_settings, with_run_folder
from fedssl.config.settings import CalibrationSettings, Settings
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from fedssl.machine.devices import check_cuda_features, count_accelerators, select_device
from fedssl.machine.process import available_cores
from fedssl.schedule.phases import phase_at
from fedssl.training import number_of_batches
from server_app.build import RunComponents, build_run
from server_app.callbacks.background import can_evaluate_in_background
from simulation.cost_counts import RoundCounts, count_rounds
from simulation.cost_measurement import Measurement, measure
from simulation.grid import LocalGrid, load_client_app
from simulation.resources import RAY_OVERHEAD_SECONDS, EngineChoice, Host, auto_engine, fit_clients

log = logging.getLogger("fedssl")


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Estimated cost of a run."""

    engine: EngineChoice
    num_clients: int
    rounds: Sequence[RoundCounts]
    round_seconds: Sequence[float]
    seconds: float  # without the start of the process
    server_memory: int  # peak bytes of the process, with clients on engine=local
    worker_memory: int  # peak bytes of each process for clients; 0 on engine=local

    @property
    def steps(self) -> int:
        return sum(counts.steps for counts in self.rounds)

    @property
    def bytes(self) -> int:
        return sum(counts.bytes_down + counts.bytes_up for counts in self.rounds)

    @property
    def memory(self) -> int:
        """Return the peak bytes of all processes."""
        return self.server_memory + self.engine.concurrency * self.worker_memory


def estimate_cost(overrides: Sequence[str]) -> CostEstimate:
    """Return the cost of a run with these overrides; raises `InputError` if it is invalid or cannot be estimated."""
    start = time.perf_counter()
    settings = load_settings(overrides)
    check_settings(settings)
    # Simulated clients are sent the path of the run folder.
    folder = settings.recording.folder or Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    settings = with_run_folder(settings, folder)
    calibration = settings.calibration
    untrained = calibration and replace(calibration, epochs=0)  # it decides what is sent, and is not measured
    log.disabled = True  # warnings are logged by the run
    try:
        grid = LocalGrid(load_client_app(), num_clients=settings.num_clients)
        components = build_run(grid, replace(settings, calibration=untrained))
        build = time.perf_counter() - start
        engine = choose_engine(settings)
        measured = measure(components, separate_workers=engine.engine == "ray")
    finally:
        log.disabled = False
    return compose_cost(components, measured, engine, build=build, calibration=calibration)


def check_settings(settings: Settings) -> None:
    """Raise `InputError` if the cost of a run cannot be estimated."""
    if settings.recording.resumed is not None:
        raise InputError("plan=true estimates a new run; leave out resume")
    if settings.pause_after is not None:
        raise InputError("plan=true estimates a complete run; leave out pause_after")
    if settings.engine.name == "deployment":
        raise InputError(
            "plan=true cannot estimate engine=deployment, because the images of devices are unknown; set engine=auto "
            "for a simulation"
        )
    if settings.engine.address is not None:
        raise InputError("plan=true estimates a run on this machine; leave out engine.address")
    if settings.secure_aggregation is not None:
        raise InputError("plan=true cannot estimate the messages of secure_aggregation; set secure_aggregation=none")
    on_cpus = settings.engine.name == "ray" and settings.engine.client_gpus == 0
    check_cuda_features(settings.training, select_device("cpu" if on_cpus else settings.machine.device))


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


def compose_cost(
    components: RunComponents,
    measured: Measurement,
    engine: EngineChoice,
    *,
    build: float,
    calibration: CalibrationSettings | None = None,
) -> CostEstimate:
    """Multiply the parts of a run by their numbers. ``build`` seconds were needed to build its components."""
    on_ray, rounds = engine.engine == "ray", count_rounds(components, saves_state=measured.saves_state)
    own_steps = _calibration_steps(calibration, components.settings.training.batch_size) if calibration else 0
    background = can_evaluate_in_background(components, engine.concurrency * components.settings.machine.threads)
    round_seconds = []
    for number, counts in enumerate(rounds, 1):
        step = measured.steps[phase_at(components.context.phases, number).number]
        client = measured.client + step * counts.steps / counts.clients
        seconds = -(-counts.clients // engine.concurrency) * client + counts.clients * measured.update
        seconds += own_steps * step
        if components.evaluator.due(number):
            seconds += (counts.clients + counts.models) * measured.observation
            evaluation = counts.models * measured.evaluation
            # In the background it runs beside the next round, which takes about as long as this one.
            seconds = max(seconds, evaluation) if background and number < len(rounds) else seconds + evaluation
        round_seconds.append(seconds)
    finish = (rounds[-1].models + 2) * measured.final_evaluation  # with the untrained encoder and raw pixels
    return CostEstimate(
        engine=engine,
        num_clients=components.settings.num_clients,
        rounds=rounds,
        round_seconds=round_seconds,
        seconds=build + sum(round_seconds) + finish + measured.figures + on_ray * RAY_OVERHEAD_SECONDS,
        server_memory=measured.server_memory,
        worker_memory=measured.worker_memory if on_ray else 0,
    )


def _calibration_steps(calibration: CalibrationSettings, batch_size: int) -> int:
    """Return the steps of the server's own training in a round."""
    num_images = int(len(load_federated(calibration.data).images) * calibration.share)
    return calibration.epochs * number_of_batches(num_images, batch_size)
