"""What ``engine=auto`` is: Ray where it ends earlier, one process elsewhere. The numbers are the same."""

import os
import time
from dataclasses import replace

import torch

from fedssl.datasets.base import load_federated
from fedssl.machine.process import set_up
from fedssl.machine.threads import available_cores
from fedssl.methods.build import build
from fedssl.seeding import torch_generator
from fedssl.settings import Settings
from fedssl.training import LocalTraining, number_of_batches, train

RAY_STARTS_IN = 20.0  # seconds, with an actor for each of two cores
LONG = 1.0  # seconds after which a step has been measured well enough


def choose_engine(settings: Settings) -> tuple[str, str]:
    """The engine for a run, and why.

    On GPUs it is Ray if there are several, and clients for them. On CPUs as many clients run at a time as the cores
    have place for, with their threads each, and as take part in a round; if there are two or more, a training step is
    measured, and Ray is taken if it saves more time than it needs to start.

    Raises
    ------
    InputError
        The pictures or the method cannot be used.
    """
    if os.name != "posix":
        return "local", "Ray needs Linux or macOS"
    gpus = torch.cuda.device_count() if settings.machine.device != "cpu" else 0
    if gpus:
        several = gpus > 1 and settings.clients_per_round > 1
        return ("ray" if several else "local"), f"{gpus} GPUs, {settings.clients_per_round} clients in a round"
    at_a_time = min(available_cores() // settings.machine.threads, settings.clients_per_round)
    if at_a_time < 2:
        return "local", "no two clients have place at a time"
    training = number_of_steps(settings) * seconds_per_step(settings)
    saved = training * (1 - 1 / at_a_time)
    why = f"about {training:.0f} s of training, {at_a_time} clients at a time"
    return ("ray" if saved > RAY_STARTS_IN else "local"), why


def number_of_steps(settings: Settings) -> int:
    """Training steps of all clients in all rounds, if they had equally many pictures."""
    pictures = len(load_federated(settings.data).images) // settings.num_clients
    epochs = settings.rounds * settings.clients_per_round * settings.training.epochs
    return epochs * number_of_batches(pictures, settings.training.batch_size)


def seconds_per_step(settings: Settings) -> float:
    """How long a client's training step takes on a CPU of this machine: one after a warm-up, if that is short."""
    set_up(settings.machine)
    method, pictures = build(settings.model), load_federated(settings.data)
    own = torch.arange(min(settings.training.batch_size, len(pictures.images) // settings.num_clients))
    if len(own) < method.smallest_batch:  # the run will be refused, or the client dropped
        return 0.0
    training = replace(LocalTraining.prepare(settings.training, method), epochs=1)
    seconds = 0.0
    for number in range(3):
        start, generator = time.perf_counter(), torch_generator(settings.seed, "choice", number)
        train(method, pictures.images, own, training=training, generator=generator, labels=pictures.labels)
        seconds = time.perf_counter() - start
        if seconds > LONG:
            break
    return seconds
