"""What ``engine=auto`` is: Ray where it ends earlier, one process elsewhere. The numbers are the same."""

import os
import time
from dataclasses import dataclass, replace

import torch

from fedssl.config.settings import Settings
from fedssl.datasets.base import load_federated
from fedssl.machine.memory import available_memory, gigabytes, peak_memory
from fedssl.machine.process import set_up
from fedssl.machine.threads import available_cores
from fedssl.methods.build import build_method
from fedssl.seeding import torch_generator
from fedssl.training import LocalTraining, number_of_batches, train

RAY_OVERHEAD_SECONDS = 10.0  # seconds that starting and ending it take, with an actor for each of two cores
MIN_STEPS_TO_MEASURE = 20  # steps, which are over before it is worth while to measure one
LONG_STEP_SECONDS = 1.0  # seconds after which a step has been measured well enough


@dataclass(frozen=True)
class EngineChoice:
    """An engine, how many clients are to run at a time on it, and why."""

    engine: str
    concurrency: int
    reason: str


def auto_engine(settings: Settings) -> EngineChoice:
    """The engine for a run.

    On GPUs it is Ray if there are several, and clients for them. On CPUs as many clients run at a time as the cores
    have place for, with their threads each, as take part in a round, and as have place in memory, where each needs as
    much as this process once it has trained a step; if these are two or more, Ray is taken if it saves more time, by
    how long that step took, than it needs to start. A run of a few steps is local, and nothing is measured.

    Raises
    ------
    InputError
        The images, the method or the strategy cannot be used.
    """
    if os.name != "posix":
        return EngineChoice("local", 1, "Ray needs Linux or macOS")
    gpus = torch.cuda.device_count() if settings.machine.device != "cpu" else 0
    if gpus:
        engine = "ray" if gpus > 1 and settings.clients_per_round > 1 else "local"
        reason = f"{gpus} GPUs, {settings.clients_per_round} clients in a round"
        return EngineChoice(engine, settings.clients_per_round, reason)
    concurrency = min(available_cores() // settings.machine.threads, settings.clients_per_round)
    if concurrency < 2:
        return EngineChoice("local", 1, "no two clients have place at a time")
    steps = number_of_steps(settings)
    if steps < MIN_STEPS_TO_MEASURE:
        return EngineChoice("local", concurrency, f"{steps} training steps")
    settings.algorithm.strategy.make()  # what it refuses is refused before anything is measured
    training = steps * seconds_per_step(settings)
    free, each = available_memory(), peak_memory()
    fit = concurrency if free is None else max(min(free // each, concurrency), 1)
    reason = f"about {training:.0f} s of training, clients at a time: {fit}"
    if fit < concurrency:
        reason += f", since each takes {gigabytes(each)} of memory"
    saved = training * (1 - 1 / fit)
    return EngineChoice("ray" if saved > RAY_OVERHEAD_SECONDS else "local", fit, reason)


def number_of_steps(settings: Settings) -> int:
    """Training steps of all clients in all rounds, if they had equally many images."""
    num_images = len(load_federated(settings.data).images) // settings.num_clients
    epochs = settings.rounds * settings.clients_per_round * settings.training.epochs
    return epochs * number_of_batches(num_images, settings.training.batch_size)


def seconds_per_step(settings: Settings) -> float:
    """How long a client's training step takes on a CPU of this machine: one after a warm-up, if that is short."""
    set_up(settings.machine)
    method, image_data = build_method(settings.model), load_federated(settings.data)
    own = torch.arange(min(settings.training.batch_size, len(image_data.images) // settings.num_clients))
    if len(own) < method.min_batch_size:  # the run will be refused, or the client dropped
        return 0.0
    training = replace(LocalTraining.prepare(settings.training, method), epochs=1)
    seconds = 0.0
    for number in range(3):
        start, generator = time.perf_counter(), torch_generator(settings.seed, "choice", number)
        train(method, image_data.images, own, training=training, generator=generator, labels=image_data.labels)
        seconds = time.perf_counter() - start
        if seconds > LONG_STEP_SECONDS:
            break
    return seconds
