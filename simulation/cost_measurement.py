"""Durations and memory of the parts of a run, measured on a few training steps, one aggregation and the evaluations.

Each part is done as the run does it, in this process, so that its peak memory is that of the run. Nothing is written
into a run folder.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Message

from client_app.worker import ClientWorker
from fedssl.arrays import Layers
from fedssl.config.load import BASE_FOLDER, parse_client_config
from fedssl.flower_internals import assign_message_id
from fedssl.machine.memory import peak_memory, reset_peak_memory
from fedssl.machine.process import return_freed_memory
from fedssl.schedule.phases import Phase
from fedssl.wire.messages import ClientUpdate, TrainPlan
from server_app.build import RunComponents
from server_app.checkpoint import save_checkpoint
from server_app.client_models import ClientModels
from server_app.round import Round
from simulation.cost_counts import batch_size, without_calibration
from simulation.evaluation_cost import EvaluationCost, measure_evaluation, seconds_of
from strategies.types import ServerState
from strategies.update_store import UpdateStorage

TRAINING_SECONDS = 4.0  # about the duration of the measured training, for all phases together
MAX_UPDATES = 20  # updates that are aggregated; more take proportionally longer


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a training step: ``fixed`` and those of each image of the batch."""

    fixed: float
    image: float

    def total(self, *, steps: float, images: float) -> float:
        """Return the seconds of steps with this number of images together."""
        return steps * self.fixed + images * self.image


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds and bytes of the parts of a run."""

    client: float  # of a client in a round, in addition to its steps
    steps: Mapping[int, StepSeconds]  # by the number of the phase
    update: float  # to validate and aggregate one update
    checkpoint: float  # to save the state of a round
    resources: float  # to measure FLOPs and memory of a training step, once in a phase
    evaluation: EvaluationCost
    step_memory: int | None  # peak bytes of tensors of a training step in the last phase; None if not measured
    server_memory: int  # peak of the process of the server, with clients on engine=local
    worker_memory: int  # peak of a process that runs clients only; 0 on engine=local
    update_memory: int  # of each update beyond `MAX_UPDATES`, if the aggregation holds them
    models: int  # of the server in the measured round
    saves_state: bool  # whether clients have a state between rounds
    state_bytes: int  # of the files that a client keeps between rounds
    checkpoint_bytes: int  # of the state of the measured round


def measure(components: RunComponents, *, separate_workers: bool) -> Measurement:
    """Measure the parts of a run, whose clients train in this process or, as on Ray, in ``separate_workers``."""
    _forget_peak()
    with TemporaryDirectory(prefix="fedssl-plan-") as name:
        folder = Path(name)
        training = _TrainingMeasurement(components, folder / "client")
        steps = {phase.number: training.step(phase) for phase in components.context.phases}
        worker_memory = 0
        if separate_workers:
            worker_memory = peak_memory()
            training.release()
            _forget_peak()
        aggregation = _measure_aggregation(components, folder / "checkpoints")
        if not separate_workers:  # clients train beside the models of the server
            training.repeat()
        start = time.perf_counter()
        costs = components.costs(components.context.phases[-1], [0]) if components.costs else None
        resources = time.perf_counter() - start
        evaluation = measure_evaluation(components, training=training.run_seconds())
        return Measurement(
            client=training.client,
            steps=steps,
            update=aggregation.update,
            checkpoint=aggregation.checkpoint,
            resources=resources,
            evaluation=evaluation,
            step_memory=int(costs["peak_memory"]) if costs else None,
            server_memory=peak_memory() + evaluation.further_memory,
            worker_memory=worker_memory,
            update_memory=aggregation.update_memory,
            models=aggregation.models,
            saves_state=training.saves_state,
            state_bytes=_bytes_in(folder / "client"),
            checkpoint_bytes=_bytes_in(folder / "checkpoints"),
        )


def _forget_peak() -> None:
    """Return freed memory, so that the peak of earlier measurements does not count."""
    return_freed_memory()
    reset_peak_memory()


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class _TrainingMeasurement:
    """Trainings of a client by the worker of a client process. ``client`` are its seconds apart from steps."""

    def __init__(self, components: RunComponents, folder: Path) -> None:
        assert components.client_data is not None
        self._components, self._folder = components, folder
        self._context = without_calibration(components.context)
        parts = components.client_data.parts
        first = Round(self._context, ServerState())
        sizes = [len(parts[client]) for client in first.slots]
        self._images = int(median(sizes))
        # Batches as large as the largest of any client need the memory of the run.
        self._largest = max(batch_size(components, size) for size in map(len, parts))
        settings = parse_client_config(components.context.client_config)
        self._settings = replace(settings, base_folders=(folder.with_name(BASE_FOLDER),))
        self._worker: ClientWorker | None = ClientWorker(self._settings)
        self.client, self.saves_state = 0.0, False
        self._step: StepSeconds = StepSeconds(0.0, 0.0)

    def release(self) -> None:
        """Free the memory of the worker."""
        self._worker = None

    def run_seconds(self) -> float:
        """Return the seconds of the training of all clients, one after the other, if all rounds were like the last."""
        settings = self._components.settings
        images = self._images * settings.training.epochs
        steps = images / batch_size(self._components, self._images)
        client = self.client + self._step.total(steps=steps, images=images)
        return settings.rounds * settings.clients_per_round * client

    def step(self, phase: Phase) -> StepSeconds:
        """Measure steps of a phase, with the batch of a client with the median number of images and half of it."""
        attempted = Round(self._context, ServerState(round=phase.first - 1))
        # Many steps on a few images would diverge.
        plan = replace(TrainPlan.from_content(attempted.messages[0].content), lr_factor=0.0)
        client = next(iter(attempted.slots))
        self._last = plan, client
        size = batch_size(self._components, self._images)
        self._train(plan, client, images=self._largest, batch_size=self._largest, epochs=2)  # warm-up, and peak memory
        if not self._components.settings.training.epochs:
            self.client = self._train(plan, client, images=size, batch_size=size, epochs=0)
            return StepSeconds(0.0, 0.0)
        whole, without = self._step_seconds(plan, client, size)
        half = max(size // 2, self._components.method.min_batch_size)
        image = 0.0
        if half < size:
            image = (whole - self._step_seconds(plan, client, half)[0]) / (size - half)
        image = min(max(image, 0.0), whole / size)
        self.client, self._step = max(0.0, without), StepSeconds(whole - size * image, image)
        return self._step

    def repeat(self) -> None:
        """Train the largest batch once more, in the last phase."""
        plan, client = self._last
        self._train(plan, client, images=self._largest, batch_size=self._largest, epochs=2)

    def _step_seconds(self, plan: TrainPlan, client: int, batch_size: int) -> tuple[float, float]:
        """Return the seconds of a step, and of a round of the client without steps."""

        def train(steps: int) -> float:
            return self._train(plan, client, images=batch_size, batch_size=batch_size, epochs=steps)

        short = min(train(1) for _ in range(3))
        seconds = TRAINING_SECONDS / 4 / len(self._context.phases)  # of each of four trainings
        steps = 1 + max(3, int(seconds / short))
        step = max(median(train(steps) for _ in range(2)) - short, 0.0) / (steps - 1)
        return step, short - step

    def _train(self, plan: TrainPlan, client: int, *, images: int, batch_size: int, epochs: int) -> float:
        assert self._components.client_data is not None
        worker = self._worker
        assert worker is not None
        order = np.concatenate(sorted(self._components.client_data.parts, key=len, reverse=True))
        worker.client_indices = [order[:images]] * (client + 1)
        worker.training = replace(worker.training, epochs=epochs, batch_size=batch_size)
        start = time.perf_counter()
        update = worker.train(plan, client, self._folder)
        self.saves_state = update.state_rounds[1] > 0
        return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class _Aggregation:
    """Cost of the aggregation of a round; fields as in `Measurement`."""

    update: float
    update_memory: int
    checkpoint: float
    models: int
    server: tuple[Round, ServerState]  # the models that the server holds while clients train


def _measure_aggregation(components: RunComponents, folder: Path) -> _Aggregation:
    """Aggregate the updates of a round, and save its state."""
    context = without_calibration(components.context)
    number = min(context.clients_per_round, MAX_UPDATES)
    numbers = (number // 2, number) if context.clients_per_round > MAX_UPDATES else (number,)
    per_client = context.strategy.server.models_per_client
    empty = ServerState(models=ClientModels(folder.parent, {}) if per_client else {})
    peaks, seconds, state = [], 0.0, empty
    for number in numbers:
        sampled = replace(
            context,
            clients_per_round=number,
            aggregation=replace(context.aggregation, over_selection=0),
            update_storage=partial(UpdateStorage, folder.parent),
        )
        attempted = Round(sampled, empty)
        start = time.perf_counter()
        state, _ = attempted.finish(_replies(attempted, context.gathered.layers))
        seconds = time.perf_counter() - start
        peaks.append(peak_memory())
    folder.mkdir()

    def save() -> None:
        models = state.models
        saved = models.saved(round=1, oldest_resumable=0) if isinstance(models, ClientModels) else models
        save_checkpoint(folder, replace(state, models=saved), keep=1)

    checkpoint = seconds_of(save)
    return _Aggregation(
        update=seconds / number,
        update_memory=(peaks[-1] - peaks[0]) // (number - number // 2),
        checkpoint=checkpoint,
        models=len(state.models),
        server=(attempted, state),
    )


def _replies(attempted: Round, gathered: Layers) -> Iterator[Message]:
    """Yield the reply of each client. Its arrays are new, and differ by 0.1% from the downloaded ones."""
    for message in attempted.messages:
        assign_message_id(message)
    for slot, message in zip(attempted.slots.values(), attempted.messages, strict=True):
        update = ClientUpdate(
            layers=_changed(attempted.starts[slot.start].expected_upload.layers),
            uploaded_parts=_changed(gathered),
            partition_id=slot.client,
            num_examples=1,
            train_loss=1.0,
            seconds=1.0,
        )
        yield Message(update.to_content(TrainPlan.from_content(message.content)), reply_to=message)


def _changed(layers: Layers) -> Layers:
    return {
        name: array * array.dtype.type(1.001) if array.dtype.kind == "f" else array.copy()
        for name, array in layers.items()
    }


def parallel_slowdown(processes: int, threads: int) -> float:
    """Return how much slower each of several concurrent processes computes than one alone, e.g. on shared cores."""
    alone, together = (_iterations(number, threads) for number in (1, processes))
    return max(1.0, alone / together)


def _iterations(processes: int, threads: int) -> float:
    """Return the mean number of training steps of a convolution that concurrent processes complete."""
    command = [sys.executable, "-c", _LOOP, str(threads)]
    running = [Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(processes)]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return mean(float(process.communicate()[0]) for process in running)


_LOOP = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
layer, images = torch.nn.Conv2d(32, 32, 3, padding=1), torch.randn(64, 32, 16, 16)
layer(images).sum().backward()
print(flush=True)
sys.stdin.readline()
steps, end = 0, time.perf_counter() + 1
while time.perf_counter() < end:
    layer(images).sum().backward()
    steps += 1
print(steps)
"""
