"""The cost of a run before it starts, for ``plan=true``: counted steps and bytes, and measured parts, multiplied.

Steps and bytes of all rounds are counted, see `simulation.round_counts`. For every phase of the schedule one client of
median size trains for some steps, one round of at most `MAX_UPDATES` clients is aggregated, and each evaluation runs
once. Nothing is written into a run folder. A run in which clients fail, or that ends early, needs less.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Message

from client_app.worker import ClientWorker
from fedssl.config.load import load_settings, parse_client_config, with_run_folder
from fedssl.config.saved_run import BASE_FOLDER
from fedssl.config.settings import CalibrationSettings, Settings
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from fedssl.flower_internals import assign_message_id
from fedssl.logs import log
from fedssl.machine.memory import peak_memory, reset_peak_memory
from fedssl.machine.process import return_freed_memory
from fedssl.partition import server_indices
from fedssl.rules import check_rules
from fedssl.schedule.phases import phase_at
from fedssl.wire.messages import ClientUpdate, TrainPlan
from server_app.build import RunComponents, build_run
from server_app.client_models import ClientModels
from server_app.exchanges.base import in_client_order
from server_app.policies import LoopPolicy
from server_app.round import Round
from server_app.rules import COST_RULES
from simulation.grid import LocalGrid, load_client_app
from simulation.resources import (
    RAY_OVERHEAD_SECONDS,
    EngineChoice,
    auto_engine,
    check_local_cuda,
    fit_local_clients,
)
from simulation.round_counts import RoundCounts, count_batches, count_notes, count_rounds
from strategies.mods.base import exchanged_layers
from strategies.types import GLOBAL, ServerState

MAX_STEPS = 20  # of a measured client
MAX_UPDATES = 20  # updates that are aggregated; more take proportionally longer


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds and bytes of the parts of a run."""

    steps: Mapping[int, float]  # seconds of a training step by the number of the phase
    update: ClientUpdate  # of a client of the last phase
    aggregation: float  # to validate and aggregate one update
    evaluation: float  # of a model in a round
    end: float  # of the final evaluation of a model
    worker_memory: int  # peak of a process after the training of a client
    server_memory: int  # peak after aggregation and evaluations, without the worker if clients train in other processes


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
    notes: Sequence[str]  # which counts are not those of the run, and why

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
        return compose_cost(components, measured, engine, build=build, calibration=calibration)
    finally:
        log.disabled = False


def check_settings(settings: Settings) -> None:
    """Raise `InputError` if the cost of a run cannot be estimated."""
    for unknown, problem in (
        (settings.recording.resumed is not None, "estimates a new run; leave out resume"),
        (settings.pause_after is not None, "estimates a complete run; leave out pause_after"),
        (
            settings.engine.name == "deployment",
            "cannot estimate engine=deployment, because the images of devices are unknown; set engine=auto for a "
            "simulation",
        ),
        (settings.engine.address is not None, "estimates a run on this machine; leave out engine.address"),
    ):
        if unknown:
            raise InputError(f"plan=true {problem}")
    check_rules(COST_RULES, settings)
    check_local_cuda(settings)


def choose_engine(settings: Settings) -> EngineChoice:
    """Return the engine of a run and the number of clients that train at once; raises `InputError` as the run."""
    choice = EngineChoice(settings.engine.name, settings.clients_per_round, "")
    if choice.engine == "auto":
        choice = auto_engine(settings)
    is_local = choice.engine == "local"
    return replace(choice, concurrency=1 if is_local else fit_local_clients(settings, choice.concurrency))


def compose_cost(
    components: RunComponents,
    measured: Measurement,
    engine: EngineChoice,
    *,
    build: float,
    calibration: CalibrationSettings | None = None,
) -> CostEstimate:
    """Multiply the parts of a run by their numbers. ``build`` seconds were needed to build its components."""
    settings, on_ray = components.settings, engine.engine == "ray"
    rounds = count_rounds(components, measured.update)
    server_steps = 0  # of the server's own training in a round
    if calibration is not None:
        num_images = len(load_federated(calibration.data).images)
        rows = server_indices(num_images, share=calibration.share, seed=settings.seed)
        server_steps = calibration.epochs * count_batches(components, len(rows))
    round_seconds = []
    for number, counts in enumerate(rounds, 1):
        steps = -(-counts.clients // engine.concurrency) * counts.steps / counts.clients + server_steps
        seconds = steps * measured.steps[phase_at(components.context.phases, number).number]
        seconds += counts.clients * measured.aggregation
        round_seconds.append(seconds + components.evaluator.due(number) * counts.models * measured.evaluation)
    end = (rounds[-1].models + 2) * measured.end  # with the untrained encoder and raw pixels
    return CostEstimate(
        engine=engine,
        num_clients=settings.num_clients,
        rounds=rounds,
        round_seconds=round_seconds,
        seconds=build + sum(round_seconds) + end + on_ray * RAY_OVERHEAD_SECONDS,
        server_memory=measured.server_memory,
        worker_memory=measured.worker_memory if on_ray else 0,
        notes=count_notes(components),
    )


def measure(components: RunComponents, *, separate_workers: bool) -> Measurement:
    """Measure the parts of a run, whose clients train in this process or, as on Ray, in ``separate_workers``."""
    evaluator, models = components.evaluator, [(GLOBAL, components.method)]
    _forget_peak()
    with TemporaryDirectory(prefix="fedssl-plan-") as name:
        steps, update, attempted = _measure_training(components, Path(name))
        worker_memory = peak_memory()
        if separate_workers:
            _forget_peak()
        replies = _replies(components, attempted, update)
        aggregation = _seconds_of(lambda: attempted.finish(in_client_order(replies, attempted.sent)))
    evaluation = 0.0
    if evaluator.due(components.settings.rounds):
        evaluation = _seconds_of(lambda: evaluator.evaluate(models))
    return Measurement(
        steps=steps,
        update=update,
        aggregation=aggregation / len(attempted.slots),
        evaluation=evaluation,
        end=_seconds_of(lambda: evaluator.evaluate(models, final=True)),
        worker_memory=worker_memory,
        server_memory=peak_memory(),
    )


def _measure_training(components: RunComponents, folder: Path) -> tuple[dict[int, float], ClientUpdate, Round]:
    """Return the seconds of a training step by the number of the phase, the last update, and its round."""
    data = components.client_data
    assert data is not None
    settings = replace(parse_client_config(components.context.client_config), base_folders=(folder / BASE_FOLDER,))
    worker, images = ClientWorker(settings), np.concatenate(data.parts)
    worker.training = replace(worker.training, epochs=1)
    sizes = [len(part) for client, part in enumerate(data.parts) if client not in data.few_images]
    trainings, seconds = components.federation.strategy.client.trainings_per_round, {}
    for phase in components.context.phases:
        attempted = _small_round(components, phase.first, folder)
        client, content = next(iter(attempted.contents.items()))
        # The largest client first: a warm-up, and the peak memory of the run.
        for num_images in (max(sizes), int(median(sizes))):
            used = images[: min(num_images, MAX_STEPS * settings.training.batch_size)]
            worker.client_indices = [used] * (client + 1)
            start = time.perf_counter()
            # Without learning: a step of the untrained model at the rate of a later round may diverge.
            update = worker.train(replace(TrainPlan.from_content(content), lr_factor=0.0), client, folder / "client")
            steps = count_batches(components, len(used)) * trainings
            seconds[phase.number] = (time.perf_counter() - start) / steps
    return seconds, update, attempted


def _small_round(components: RunComponents, number: int, folder: Path) -> Round:
    """Return a round of at most `MAX_UPDATES` clients, which start from the untrained model."""
    context, settings, federation = components.context, components.settings, components.federation
    context = replace(
        context,
        clients_per_round=min(context.clients_per_round, MAX_UPDATES),
        settings=replace(settings, recording=replace(settings.recording, folder=folder)),
    )
    federation = replace(federation, context=context, policy=LoopPolicy())
    models = ClientModels(folder, {}) if federation.strategy.server.models_per_client else {}
    return Round(federation, ServerState(round=number - 1, models=models))


def _replies(components: RunComponents, attempted: Round, update: ClientUpdate) -> Iterator[Message]:
    """Yield a reply of each client, with weights that differ by 0.1% from those it starts from."""
    for client, message in zip(attempted.slots, attempted.messages, strict=True):
        assign_message_id(message)
        slot = attempted.slots[client]
        start = attempted.starts[slot.start].expected_upload.layers
        layers = {
            name: array * array.dtype.type(1.001) if array.dtype.kind == "f" else array.copy()
            for name, array in exchanged_layers(components.federation.mods, start, slot.variants).items()
        }
        plan, codec = TrainPlan.from_content(message.content), components.context.codec
        reply = replace(update, layers=layers, partition_id=client).to_content(plan, codec)
        yield Message(reply, reply_to=message)


def _forget_peak() -> None:
    """Return freed memory, so that the peak of earlier work does not count."""
    return_freed_memory()
    reset_peak_memory()


def _seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
