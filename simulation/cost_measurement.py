"""Durations and memory of the parts of a run, measured on a few training steps, one aggregation and the evaluations.

Each part is done once as the run does it, in this process, so that its peak memory is that of the run. Nothing is
written into a run folder.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

from flwr.app import Message

from client_app.worker import ClientWorker
from fedssl.arrays import Layers
from fedssl.compat import assign_message_id
from fedssl.config.load import parse_client_config
from fedssl.machine.memory import peak_memory
from fedssl.methods.base import build_method
from fedssl.plots.partition import save_partition_plot
from fedssl.training import number_of_batches
from fedssl.wire.messages import ClientUpdate, TrainPlan
from server_app.build import RunComponents
from server_app.round import Round
from simulation.cost_counts import without_calibration
from strategies.interfaces import GLOBAL, ServerState

TRAINING_SECONDS = 2.0  # about the duration of the measured training
MAX_UPDATES = 20  # updates that are aggregated; more take proportionally longer
FIGURES = 3  # that a run plots at its end


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds and bytes of the parts of a run."""

    client: float  # of a client in a round, in addition to its steps
    step: float  # of a training step in the first phase
    update: float  # to validate and aggregate one update
    evaluation: float  # of the global model in a round
    observation: float  # of the collapse metrics of one model
    finish: float  # final evaluation and figures
    server_memory: int  # peak of a process that runs no clients
    worker_memory: int  # peak of a process that runs clients only
    peak_memory: int  # of a process that does both
    update_memory: int  # of each update beyond `MAX_UPDATES`, if the aggregation holds them
    state_bytes: int  # of the files that a client keeps between rounds


def measure(components: RunComponents) -> Measurement:
    """Measure the parts of a run."""
    base = peak_memory()
    attempted = Round(components.context, ServerState())
    update, update_memory = _measure_aggregation(components)
    evaluation, observation, finish = _measure_evaluation(components, attempted)
    server_memory = peak_memory()
    with TemporaryDirectory(prefix="fedssl-plan-") as folder:
        client, step = _measure_training(components, attempted, Path(folder))
        state_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return Measurement(
        client=client,
        step=step,
        update=update,
        evaluation=evaluation,
        observation=observation,
        finish=finish,
        server_memory=server_memory,
        worker_memory=base + peak_memory() - server_memory,
        peak_memory=peak_memory(),
        update_memory=update_memory,
        state_bytes=state_bytes,
    )


def _measure_training(components: RunComponents, attempted: Round, folder: Path) -> tuple[float, float]:
    """Return the seconds of a client apart from its steps, and of a step."""
    assert components.client_data is not None
    parts = components.client_data.parts
    slot = next(iter(attempted.slots.values()))
    plan = TrainPlan.from_content(attempted.messages[0].content)
    worker = ClientWorker(parse_client_config(plan.settings))
    sizes = {client: len(parts[client]) for client in attempted.slots}
    client = min(sizes, key=lambda client: abs(sizes[client] - median(sizes.values())))
    batches = number_of_batches(sizes[client], worker.training.batch_size, min_batch_size=worker.method.min_batch_size)
    batch_size = -(-sizes[client] // batches)

    def train(num_batches: int, epochs: int) -> float:
        worker.client_indices = [parts[client][: num_batches * batch_size]] * (slot.client + 1)
        worker.training = replace(worker.training, epochs=epochs)
        start = time.perf_counter()
        worker.train(plan, slot.client, folder)
        return time.perf_counter() - start

    if not worker.training.epochs:
        return train(batches, 0), 0.0
    train(1, 1)  # warm-up
    short = min(train(1, 1) for _ in range(3))
    steps = max(2, int(TRAINING_SECONDS / short))
    used = min(batches, steps)
    epochs = -(-steps // used)
    long = train(used, epochs)
    step = max(long - short, 0.0) / (used * epochs - 1)
    return max(0.0, short - step), step


def _measure_aggregation(components: RunComponents) -> tuple[float, int]:
    """Return the seconds to aggregate an update, and the memory of each if the aggregation holds them."""
    context = without_calibration(components.context)
    number = min(context.clients_per_round, MAX_UPDATES)
    numbers = (number // 2, number) if context.clients_per_round > MAX_UPDATES else (number,)
    peaks, seconds = [], 0.0
    for number in numbers:
        sampled = replace(context, clients_per_round=number, aggregation=replace(context.aggregation, over_selection=0))
        attempted = Round(sampled, ServerState())
        start = time.perf_counter()
        attempted.finish(_replies(attempted, context.gathered.layers))
        seconds = time.perf_counter() - start
        peaks.append(peak_memory())
    return seconds / number, (peaks[-1] - peaks[0]) // (number - number // 2)


def _replies(attempted: Round, gathered: Layers) -> Iterator[Message]:
    """Yield a reply of every client with arrays of its own, which differ little from those that it downloads."""
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


def _measure_evaluation(components: RunComponents, attempted: Round) -> tuple[float, float, float]:
    """Return the seconds to evaluate a model in a round, to measure its collapse, and of the end of a run."""
    evaluator, method, monitor = components.evaluator, components.method, components.monitor
    evaluation = observation = 0.0
    if components.settings.evaluation.every:
        evaluation = _seconds(lambda: evaluator.evaluate([(GLOBAL, method)]))
        if monitor is not None:
            layers = next(iter(attempted.starts.values())).model.layers
            observation = _seconds(lambda: monitor.finish({GLOBAL: layers}))
    untrained = build_method(components.settings.model).to(components.device)
    finish = _seconds(lambda: evaluator.evaluate([(GLOBAL, method)], final=True))
    finish += _seconds(lambda: evaluator.baselines(untrained))
    return evaluation, observation, finish + FIGURES * _seconds(lambda: _plot_partition(components))


def _plot_partition(components: RunComponents) -> None:
    assert components.client_data is not None
    image_data, parts = components.client_data.image_data, components.client_data.parts
    with TemporaryDirectory(prefix="fedssl-plan-") as folder:
        save_partition_plot(Path(folder) / "partition.png", parts, image_data.labels, image_data.classes)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


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
