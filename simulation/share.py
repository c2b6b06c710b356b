"""What of the hosts a client gets, and how many clients run at a time."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedssl.config.settings import EngineSettings, MachineSettings
from fedssl.errors import InputError

log = logging.getLogger("fedssl")

MAX_CLIENTS_PER_GPU = 4  # more processes on one GPU wait for each other


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
    import torch  # here: reading settings needs no torch

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
