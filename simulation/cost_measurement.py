"""Seconds and memory of the parts of a run, measured in this process as the run does them.

For every phase of the schedule one client of median size trains for about a second. One round of at most `MAX_UPDATES`
clients is aggregated, and each evaluation runs once. Nothing is written into a run folder.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Message

from client_app.worker import ClientWorker
from fedssl.arrays import Layers
from fedssl.config.load import BASE_FOLDER, parse_client_config
from fedssl.flower_internals import assign_message_id
from fedssl.machine.memory import peak_memory, reset_peak_memory
from fedssl.machine.process import return_freed_memory
from fedssl.plots.partition import save_partition_plot
from fedssl.schedule.phases import Phase
from fedssl.wire.messages import ClientUpdate, TrainPlan
from server_app.build import RunComponents
from server_app.client_models import ClientModels
from server_app.exchanges.base import in_client_order
from server_app.round import Round
from simulation.cost_counts import batch_size
from strategies.types import GLOBAL, ServerState

STEP_SECONDS = 1.0  # about the duration of the measured steps of a phase
MAX_UPDATES = 20  # updates that are aggregated; more take proportionally longer


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds and bytes of the parts of a run."""

    client: float  # of a client in a round, apart from its steps
    steps: Mapping[int, float]  # seconds of a training step by the number of the phase
    update: float  # to validate and aggregate one update
    observation: float  # of the collapse metrics of a model
    evaluation: float  # of a model in a round
    final_evaluation: float  # of a model at the end
    figures: float  # of a figure, with the import of matplotlib
    worker_memory: int  # peak of a process after the training of a client
    server_memory: int  # peak after aggregation and evaluations, without the worker if clients train in other processes
    saves_state: bool  # whether clients have a state between rounds


def measure(components: RunComponents, *, separate_workers: bool) -> Measurement:
    """Measure the parts of a run, whose clients train in this process or, as on Ray, in ``separate_workers``."""
    _forget_peak()
    with TemporaryDirectory(prefix="fedssl-plan-") as name:
        folder = Path(name)
        training = _Training(components, folder)
        steps = {phase.number: training.step_seconds(phase) for phase in components.context.phases}
        worker_memory = peak_memory()
        if separate_workers:
            training.worker = None
            _forget_peak()
        update = _update_seconds(components, folder)
        evaluator, models = components.evaluator, [(GLOBAL, components.method)]
        observation = evaluation = 0.0
        if evaluator.due(components.settings.rounds):
            evaluation = seconds_of(lambda: evaluator.evaluate(models))
            if components.monitor is not None:
                layers, finish = components.context.initial_model().layers, components.monitor.finish
                observation = min(seconds_of(lambda: finish({GLOBAL: layers})) for _ in range(2))
        final_evaluation = seconds_of(lambda: evaluator.evaluate(models, final=True))
        figures = seconds_of(lambda: _plot_partition(components, folder))  # matplotlib needs 0.1 GB
        return Measurement(
            client=training.client,
            steps=steps,
            update=update,
            observation=observation,
            evaluation=evaluation,
            final_evaluation=final_evaluation,
            figures=figures,
            worker_memory=worker_memory,
            server_memory=peak_memory(),
            saves_state=training.saves_state,
        )


def _plot_partition(components: RunComponents, folder: Path) -> None:
    data = components.client_data
    assert data is not None
    save_partition_plot(folder / "partition.png", data.parts, data.image_data.labels, data.image_data.classes)


def _forget_peak() -> None:
    """Return freed memory, so that the peak of earlier work does not count."""
    return_freed_memory()
    reset_peak_memory()


class _Training:
    """Trainings of a client by the worker of a client process. ``client`` are its seconds apart from steps."""

    def __init__(self, components: RunComponents, folder: Path) -> None:
        data = components.client_data
        assert data is not None
        self._federation, self._folder = components.federation, folder / "client"
        settings = parse_client_config(components.context.client_config)
        self.worker: ClientWorker | None = ClientWorker(replace(settings, base_folders=(folder / BASE_FOLDER,)))
        sizes = [len(part) for client, part in enumerate(data.parts) if client not in data.few_images]
        self._median, self._largest = (batch_size(components, int(of(sizes))) for of in (median, max))
        self._images = np.concatenate(data.parts)
        self.client, self.saves_state = 0.0, False

    def step_seconds(self, phase: Phase) -> float:
        """Return the seconds of a training step of a phase, with the batch of a client of median size."""
        attempted = Round(self._federation, ServerState(round=phase.first - 1))
        # Many steps on the images of one batch would diverge.
        plan = replace(TrainPlan.from_content(attempted.messages[0].content), lr_factor=0.0)
        client = next(iter(attempted.slots))
        self._train(plan, client, batch=self._largest, steps=2)  # warm-up, and the peak memory of the run
        short = min(self._train(plan, client, batch=self._median, steps=1) for _ in range(2))
        steps = 1 + max(2, int(STEP_SECONDS / short))
        step = max(self._train(plan, client, batch=self._median, steps=steps) - short, 0.0) / (steps - 1)
        self.client = max(0.0, short - step)
        return step / self._federation.strategy.client.trainings_per_round

    def _train(self, plan: TrainPlan, client: int, *, batch: int, steps: int) -> float:
        worker = self.worker
        assert worker is not None
        worker.client_indices = [self._images[:batch]] * (client + 1)
        worker.training = replace(worker.training, epochs=steps, batch_size=batch)  # one step per epoch
        start = time.perf_counter()
        update = worker.train(plan, client, self._folder)
        self.saves_state = update.state_rounds[1] > 0
        return time.perf_counter() - start


def _update_seconds(components: RunComponents, folder: Path) -> float:
    """Return the seconds of the aggregation of a round, divided by the number of its updates."""
    context, settings = components.context, components.settings
    number = min(context.clients_per_round, MAX_UPDATES)
    settings = replace(settings, recording=replace(settings.recording, folder=folder))
    federation = replace(
        components.federation,
        context=replace(context, clients_per_round=number, settings=settings),
        policy=replace(components.federation.policy, extra=0),
    )
    per_client = federation.strategy.server.models_per_client
    attempted = Round(federation, ServerState(models=ClientModels(folder, {}) if per_client else {}))
    replies = _replies(attempted, gathered=context.gathered.layers)
    return seconds_of(lambda: attempted.finish(in_client_order(replies, attempted.sent))) / number


def _replies(attempted: Round, *, gathered: Layers) -> Iterator[Message]:
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


def seconds_of(function: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
