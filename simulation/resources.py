"""The engine that ``engine=auto`` selects, and the resources and number of concurrent clients on Ray.

Neither changes the results of a run. torch and training are imported in functions, because importing them is slow.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fedssl.config.settings import EngineSettings, MachineSettings, Settings
from fedssl.errors import InputError
from fedssl.logs import log, print_line
from fedssl.machine.memory import available_memory, gigabytes, peak_memory
from fedssl.machine.process import available_cores

RAY_OVERHEAD_SECONDS = 11.0  # to import, start and stop Ray with an actor for each of two cores
MIN_STEPS_TO_MEASURE = 20  # a run of fewer steps takes less time than a measurement
LONG_STEP_SECONDS = 1.0  # a step of this duration needs no repetition
GPU_UNITS = 10_000  # Ray's parts of a GPU
MAX_CLIENTS_PER_GPU = 4  # more processes on one GPU wait for each other


@dataclass(frozen=True)
class EngineChoice:
    """An engine, the number of concurrent clients, and the reason."""

    engine: str
    concurrency: int
    reason: str


def auto_engine(settings: Settings) -> EngineChoice:
    """Select the engine of a run."""
    return choose_on_gpus(settings) or choose_on_cpus(settings)


def choose_on_gpus(settings: Settings) -> EngineChoice | None:
    """Select Ray if there are several GPUs and several clients per round; return None if there is no GPU."""
    from fedssl.machine.devices import count_accelerators

    if os.name != "posix":
        return EngineChoice("local", 1, "Ray needs Linux or macOS")
    gpus = count_accelerators(settings.machine.device)
    if not gpus:
        return None
    engine = "ray" if gpus > 1 and settings.clients_per_round > 1 and not _uses_ray() else "local"
    return EngineChoice(
        engine, settings.clients_per_round, f"{gpus} GPUs, {settings.clients_per_round} clients in a round"
    )


def _uses_ray() -> bool:
    """Return whether the program of the user has started Ray, which a process can do only once."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def choose_on_cpus(settings: Settings) -> EngineChoice:
    """Select the engine of a valid run without a GPU.

    The concurrency is limited by the cores (``threads`` per client), by the clients of a round, and by memory, where a
    client needs the peak of this process after a training step. Ray is selected if, by the time of that step, it saves
    more than its start costs. A run of a few steps uses ``local`` without a measurement.
    """
    concurrency = min(available_cores() // settings.machine.threads, settings.clients_per_round)
    if _uses_ray():
        return EngineChoice("local", 1, "this process uses Ray for something else")
    if concurrency < 2:
        return EngineChoice("local", 1, "fewer than two clients fit on this machine at once")
    steps = number_of_steps(settings)
    if steps < MIN_STEPS_TO_MEASURE:
        return EngineChoice("local", concurrency, f"{steps} training steps")
    training = steps * seconds_per_step(settings)
    free, each = available_memory(), peak_memory()
    fit = concurrency if free is None else max(min(free // each, concurrency), 1)
    reason = f"about {training:.0f} s of training, clients at once: {fit}"
    if fit < concurrency:
        reason += f", because each needs {gigabytes(each)} of memory"
    saved = training * (1 - 1 / fit)
    return EngineChoice("ray" if saved > RAY_OVERHEAD_SECONDS else "local", fit, reason)


def server_on_gpus(settings: Settings) -> Settings:
    """Return the settings of a server that shares the GPUs with Ray's clients.

    From here on this process occupies memory of each GPU.
    """
    from fedssl.machine.devices import device_with_most_memory

    device = device_with_most_memory(settings.machine.device)
    if device != settings.machine.device:
        print_line(f"the server uses {device}, which has most free memory")
    return replace(settings, machine=replace(settings.machine, device=device))


def check_local_resources(settings: Settings) -> None:
    """Raise `InputError` if a client needs more CPUs or GPUs than this machine has; Ray is not started."""
    engine = settings.engine
    if engine.name in ("auto", "ray") and engine.address is None and (engine.client_cpus or engine.client_gpus):
        fit_local_clients(settings, settings.clients_per_round)


def check_local_cuda(settings: Settings) -> None:
    """Raise `InputError` if clients need a feature of CUDA that their device on this machine lacks."""
    from fedssl.machine.devices import check_cuda_features, select_device

    engine = settings.engine.name
    if engine == "auto" and (choice := choose_on_gpus(settings)):
        engine = choice.engine
    on_cpus = engine == "ray" and settings.engine.client_gpus == 0
    check_cuda_features(settings.training, select_device("cpu" if on_cpus else settings.machine.device))


def fit_local_clients(settings: Settings, max_clients: int) -> int:
    """Return the number of clients that Ray runs at once on this machine, see `fit_clients`."""
    from fedssl.machine.devices import count_accelerators

    _, clients = fit_clients(
        [Host(cpus=available_cores(), gpus=count_accelerators(settings.machine.device))],
        client_cpus=settings.engine.client_cpus,
        client_gpus=settings.engine.client_gpus,
        threads=settings.machine.threads,
        max_clients=max_clients,
    )
    return clients


def number_of_steps(settings: Settings) -> int:
    """Return the training steps of all clients in all rounds, for clients with equal numbers of images."""
    from fedssl.datasets.base import load_federated
    from fedssl.training import number_of_batches

    num_images = len(load_federated(settings.data).images) // settings.num_clients
    epochs = settings.rounds * settings.clients_per_round * settings.training.epochs
    return epochs * number_of_batches(num_images, settings.training.batch_size)


def seconds_per_step(settings: Settings) -> float:
    """Measure a client's training step on a CPU of this machine, after a warm-up unless that is slow."""
    import torch

    from fedssl.datasets.base import load_federated
    from fedssl.machine.process import configure_process
    from fedssl.methods.base import build_method
    from fedssl.seeding import torch_generator
    from fedssl.training import LocalTrainer, train

    configure_process(settings.machine)
    method, image_data = build_method(settings.model), load_federated(settings.data)
    indices = torch.arange(min(settings.training.batch_size, len(image_data.images) // settings.num_clients))
    if len(indices) < method.min_batch_size:  # the run will be rejected, or the client dropped
        return 0.0
    training = replace(LocalTrainer.build(settings.training, method), epochs=1)
    seconds = 0.0
    for repetition in range(3):
        start, generator = time.perf_counter(), torch_generator(settings.seed, "choice", repetition)
        train(method, image_data.images, indices, training=training, generator=generator, labels=image_data.labels)
        seconds = time.perf_counter() - start
        if seconds > LONG_STEP_SECONDS:
            break
    return seconds


@dataclass(frozen=True)
class Host:
    """Resources of a machine for clients, and its id in Ray."""

    cpus: int
    gpus: int
    node_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class ClientResources:
    """Resources of one client."""

    cpus: int
    gpus: float


@dataclass(frozen=True)
class ClientMemory:
    """Free memory of a GPU, and the memory that each client needs, in bytes."""

    free: int
    each: int

    @property
    def clients(self) -> int:
        """Return the number of clients that fit on the GPU; at least one, which may run out of memory."""
        return max(self.free // self.each, 1)


def fit_clients(
    hosts: Sequence[Host],
    *,
    client_cpus: int | None,
    client_gpus: float | None,
    threads: int,
    max_clients: int,
    max_per_gpu: int = MAX_CLIENTS_PER_GPU,
) -> tuple[ClientResources, int]:
    """Return the resources of a client, which runs on one host, and the number of clients that run at once.

    ``hosts`` have 0 GPUs if clients train on CPUs. Without ``client_cpus`` a client has a CPU per thread, or one if it
    uses a GPU. Without ``client_gpus`` it has an equal share, so that every GPU runs the same number of clients, at
    most ``max_per_gpu``.
    """
    cores, gpus = max(host.cpus for host in hosts), max(host.gpus for host in hosts)
    if client_gpus and (client_gpus * GPU_UNITS < 1 or (client_gpus > 1 and client_gpus != int(client_gpus))):
        raise InputError(
            f"engine.client_gpus={client_gpus} must be 0, a share from {1 / GPU_UNITS} to 1, or a whole number of GPUs"
        )
    if client_gpus is not None and client_gpus > gpus:
        raise InputError(f"engine.client_gpus={client_gpus} but clients can use {gpus} GPUs; set engine.client_gpus=0")
    on_gpus = gpus > 0 and client_gpus != 0
    cpus = client_cpus if client_cpus is not None else 1 if on_gpus else min(threads, cores)
    if cpus != int(cpus) or not 1 <= cpus <= cores:
        raise InputError(f"engine.client_cpus={cpus} must be a whole number from 1 to {cores}, the number of CPUs")
    if not on_gpus:
        return ClientResources(cpus, 0.0), min(sum(host.cpus // cpus for host in hosts), max_clients)
    if client_gpus is None:
        with_gpus = [host for host in hosts if host.gpus]
        clients = min(sum(host.cpus // cpus for host in with_gpus), max_clients)
        per_gpu = min(max(1, clients // sum(host.gpus for host in with_gpus)), max_per_gpu)
        client_gpus = 1 / per_gpu
    client_gpus = int(client_gpus * GPU_UNITS + 1e-6) / GPU_UNITS  # Ray may round up, and fewer clients would fit
    fit = sum(min(host.cpus // cpus, _fit(host.gpus, client_gpus)) for host in hosts)
    if not fit:
        raise InputError(
            f"no host has {cpus} CPUs and {client_gpus:g} GPUs for a client; set engine.client_cpus or "
            "engine.client_gpus=0"
        )
    return ClientResources(cpus, client_gpus), min(fit, max_clients)


def _fit(gpus: int, share: float) -> int:
    """Return the number of clients that fit on the GPUs; a share below 1 is on one GPU."""
    return gpus * int(1 / share + 1e-6) if share <= 1 else int(gpus / share)


def clients_of_gpus(hosts: Sequence[Host], *, client: ClientResources, clients: int) -> list[list[int]]:
    """Distribute clients with a share of at most one GPU; return the number on each GPU of each host.

    Every GPU gets its first client before any GPU gets a second one, as far as the CPUs of its host suffice.
    """
    counts = [[0] * host.gpus for host in hosts]
    for _ in range(_fit(1, client.gpus)):
        for host, gpus in zip(hosts, counts, strict=True):
            for index in range(host.gpus):
                if clients and (sum(gpus) + 1) * client.cpus <= host.cpus:
                    gpus[index] += 1
                    clients -= 1
    return counts


def plan_client_resources(
    hosts: Sequence[Host],
    *,
    engine: EngineSettings,
    machine: MachineSettings,
    max_clients: int,
    measure: Callable[[], ClientMemory | None] = lambda: None,
) -> tuple[ClientResources, int]:
    """Apply `fit_clients` to the settings of a run, and print the result.

    ``measure`` returns the GPU memory of a client, None if unknown. It is called if several clients would share a GPU
    by default, and limits their number.
    """
    import torch

    if ":" in machine.device:
        raise InputError(
            f"device={machine.device} is one device but engine=ray distributes clients over all GPUs; set "
            f"device={machine.device.partition(':')[0]}, or engine=local"
        )
    gpus = sum(host.gpus for host in hosts)
    fit = partial(
        fit_clients,
        [replace(host, gpus=0) for host in hosts] if machine.device == "cpu" else hosts,
        client_cpus=engine.client_cpus,
        client_gpus=engine.client_gpus,
        threads=machine.threads,
        max_clients=max_clients,
    )
    client, clients = fit()
    reason = ""
    if engine.client_gpus is None and 0 < client.gpus < 1:
        memory, share = measure(), client.gpus
        if memory is not None:
            client, clients = fit(max_per_gpu=min(memory.clients, MAX_CLIENTS_PER_GPU))
            reason = f", because each needs {gigabytes(memory.each)} of GPU memory" if client.gpus > share else ""
    of_gpus = f" and {client.gpus:g} of {gpus} GPUs" if client.gpus else ""
    of_hosts = f" of {len(hosts)} hosts" if len(hosts) > 1 else ""
    cpus = sum(host.cpus for host in hosts)
    print_line(f"{clients} clients at once, each on {client.cpus} of {cpus} CPUs{of_gpus}{of_hosts}{reason}")
    if not client.gpus and machine.device != "cpu" and (gpus or torch.cuda.is_available()):
        log.warning("clients train on CPUs although there are GPUs; set engine.client_gpus to the share of a client")
    return client, clients
