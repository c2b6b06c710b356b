"""Choose the engine of ``engine=auto``, the resources of a client on Ray, and how many clients run at once.

The numbers of a run do not depend on either. Imports of torch and of training are in the functions: reading settings
needs neither.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedssl.config.settings import EngineSettings, MachineSettings, Settings
from fedssl.errors import InputError
from fedssl.machine.memory import available_memory, gigabytes, peak_memory
from fedssl.machine.threads import available_cores

log = logging.getLogger("fedssl")

RAY_OVERHEAD_SECONDS = 10.0  # seconds that starting and ending it take, with an actor for each of two cores
MIN_STEPS_TO_MEASURE = 20  # steps, which are over before it is worth while to measure one
LONG_STEP_SECONDS = 1.0  # seconds after which a step has been measured well enough
MAX_CLIENTS_PER_GPU = 4  # more processes on one GPU wait for each other


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
    import torch

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
    settings.algorithm.strategy.instantiate()  # what it refuses is refused before anything is measured
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
    from fedssl.datasets.base import load_federated
    from fedssl.training import number_of_batches

    num_images = len(load_federated(settings.data).images) // settings.num_clients
    epochs = settings.rounds * settings.clients_per_round * settings.training.epochs
    return epochs * number_of_batches(num_images, settings.training.batch_size)


def seconds_per_step(settings: Settings) -> float:
    """How long a client's training step takes on a CPU of this machine: one after a warm-up, if that is short."""
    import torch

    from fedssl.datasets.base import load_federated
    from fedssl.machine.process import configure_process
    from fedssl.methods.build import build_method
    from fedssl.seeding import torch_generator
    from fedssl.training import LocalTrainer, train

    configure_process(settings.machine)
    method, image_data = build_method(settings.model), load_federated(settings.data)
    own = torch.arange(min(settings.training.batch_size, len(image_data.images) // settings.num_clients))
    if len(own) < method.min_batch_size:  # the run will be refused, or the client dropped
        return 0.0
    training = replace(LocalTrainer.build(settings.training, method), epochs=1)
    seconds = 0.0
    for number in range(3):
        start, generator = time.perf_counter(), torch_generator(settings.seed, "choice", number)
        train(method, image_data.images, own, training=training, generator=generator, labels=image_data.labels)
        seconds = time.perf_counter() - start
        if seconds > LONG_STEP_SECONDS:
            break
    return seconds


@dataclass(frozen=True)
class Host:
    """What clients can have of a machine.

    Attributes
    ----------
    cpus, gpus : int
    """

    cpus: int
    gpus: int


@dataclass(frozen=True)
class ClientResources:
    """What one client occupies.

    Attributes
    ----------
    cpus : int
    gpus : float
    """

    cpus: int
    gpus: float


def fit_clients(
    hosts: Sequence[Host], *, client_cpus: int | None, client_gpus: float | None, threads: int, max_clients: int
) -> tuple[ClientResources, int]:
    """What a client occupies, and how many clients run at a time.

    Parameters
    ----------
    hosts : sequence of Host
        With 0 GPUs if clients are to train on CPUs. A client is on one of them.
    client_cpus : int or None
        None: one for each of its threads, and a single one beside a GPU.
    client_gpus : float or None
        None: such a share that every GPU has clients, the same number on each, and at most 4.
    threads : int
        Of a client.
    max_clients : int
        How many clients are of use at a time.

    Raises
    ------
    InputError
        No host has what is asked for.
    """
    cores, gpus = max(host.cpus for host in hosts), max(host.gpus for host in hosts)
    if client_gpus is not None and (client_gpus < 0 or (client_gpus > 1 and client_gpus != int(client_gpus))):
        raise InputError(f"engine.client_gpus={client_gpus} must be a share from 0 to 1 or a whole number of GPUs")
    if client_gpus is not None and client_gpus > gpus:
        raise InputError(f"engine.client_gpus={client_gpus} but clients can have {gpus} GPUs; set engine.client_gpus=0")
    on_gpus = gpus > 0 and client_gpus != 0
    cpus = client_cpus if client_cpus is not None else 1 if on_gpus else min(threads, cores)
    if cpus != int(cpus) or not 1 <= cpus <= cores:
        raise InputError(f"engine.client_cpus={cpus} must be a whole number from 1 to the {cores} CPUs there are")
    if not on_gpus:
        return ClientResources(cpus, 0.0), min(sum(host.cpus // cpus for host in hosts), max_clients)
    if client_gpus is None:
        with_gpus = [host for host in hosts if host.gpus]
        clients = min(sum(host.cpus // cpus for host in with_gpus), max_clients)
        per_gpu = min(max(1, clients // sum(host.gpus for host in with_gpus)), MAX_CLIENTS_PER_GPU)
        client_gpus = 1.0 if per_gpu == 1 else int(10_000 / per_gpu) / 10_000  # the digits that Ray counts
    fit = sum(min(host.cpus // cpus, _fit(host.gpus, client_gpus)) for host in hosts)
    return ClientResources(cpus, client_gpus), min(fit, max_clients)


def _fit(gpus: int, share: float) -> int:
    """How many clients have place on so many GPUs; a share of one lies on one."""
    return gpus * int(1 / share + 1e-6) if share <= 1 else int(gpus / share)


def plan_client_resources(
    hosts: Sequence[Host], *, engine: EngineSettings, machine: MachineSettings, max_clients: int
) -> tuple[ClientResources, int]:
    """What `fit_clients` gives for the settings of a run, and a line that says so; raises `InputError` as it does."""
    import torch

    gpus = sum(host.gpus for host in hosts)
    client, clients = fit_clients(
        [replace(host, gpus=0) for host in hosts] if machine.device == "cpu" else hosts,
        client_cpus=engine.client_cpus,
        client_gpus=engine.client_gpus,
        threads=machine.threads,
        max_clients=max_clients,
    )
    of_gpus = f" and {client.gpus:g} of {gpus} GPUs" if client.gpus else ""
    of_hosts = f" of {len(hosts)} hosts" if len(hosts) > 1 else ""
    cpus = sum(host.cpus for host in hosts)
    print(f"{clients} clients at a time, each on {client.cpus} of {cpus} CPUs{of_gpus}{of_hosts}", flush=True)
    if not client.gpus and machine.device != "cpu" and (gpus or torch.cuda.is_available()):
        log.warning("clients train on CPUs though there are GPUs; engine.client_gpus says what of them one gets")
    return client, clients
