"""GPUs on Ray: which one each process for clients uses, the memory that a client needs, and whether a GPU works.

Ray fills a GPU before it uses the next one of a host. Therefore a GPU that clients share is reserved as a whole, by a
placement group, with the CPUs of its clients.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from client_app.worker import ClientWorker
from fedssl.config.load import parse_client_config
from fedssl.config.settings import Settings
from fedssl.logs import log
from fedssl.machine.cuda_graphs import WARMUP_STEPS
from fedssl.machine.devices import free_memory, is_gpu, select_device
from fedssl.machine.out_of_memory import is_out_of_memory
from fedssl.seeding import torch_generator
from fedssl.training import train
from server_app.console import log_while_waiting
from simulation.ray_session import last_line
from simulation.resources import ClientMemory, ClientResources, Host, clients_of_gpus

Placement: TypeAlias = str | PlacementGroupSchedulingStrategy  # "SPREAD": Ray distributes over hosts
# Bytes of GPU memory that a process needs besides tensors. An estimate, not a measurement: CUDA's context and kernels.
OUTSIDE_TENSORS = 600_000_000
MEASURED_STEPS = WARMUP_STEPS + 2  # CUDA graphs are captured after the warm-up


def place_clients(hosts: Sequence[Host], *, client: ClientResources, clients: int) -> list[Placement]:
    """Return the placement of each process for clients, so that clients that share GPUs use all of them."""
    if not 0 < client.gpus < 1:
        return ["SPREAD"] * clients
    placements: list[Placement] = []
    for host, counts in zip(hosts, clients_of_gpus(hosts, client=client, clients=clients), strict=True):
        for count in filter(None, counts):
            # If the host is lost, Ray moves the group to another one with a free GPU.
            group = placement_group(
                [{"GPU": 1, "CPU": count * client.cpus}], strategy="STRICT_PACK", _soft_target_node_id=host.node_id
            )
            placements += [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)] * count
    return placements


def measure_client(settings: Settings) -> ClientMemory | None:
    """Measure `client_memory` on one of Ray's GPUs; None without an accelerator, or, with a warning, if it fails."""
    measured = ray.remote(num_cpus=1, num_gpus=1, max_retries=0)(client_memory).remote(settings.client_yaml)
    try:
        with log_while_waiting("the memory of a client is not measured yet, which needs a free GPU"):
            memory: ClientMemory | None = ray.get(measured)
            return memory
    except RayError as error:
        log.warning("the GPU memory of a client could not be measured (%s)", last_line(error))
        return None


def client_memory(client_yaml: str) -> ClientMemory | None:
    """Train some steps as the client with most images, and return the memory of its GPU; None on a CPU.

    ``client_yaml`` is `Settings.client_yaml`. A client that runs out of memory needs all of it.
    """
    settings = parse_client_config(client_yaml)
    device = select_device(settings.machine.device)
    if not is_gpu(device):
        return None
    free, before = free_memory(device), torch.accelerator.memory_reserved(device)
    torch.accelerator.reset_peak_memory_stats(device)
    try:
        worker = ClientWorker(settings)
        assert worker.client_indices is not None  # of simulated clients
        largest = torch.from_numpy(np.asarray(max(worker.client_indices, key=len)))[: worker.training.batch_size]
        smaller = largest[: max(len(largest) - 1, worker.method.min_batch_size)]
        # Captured steps keep their memory, and steps of another batch size need as much again before their capture.
        for batch in [largest] if worker.training.graphs is None else [largest, smaller]:
            train(
                worker.method,
                worker.images,
                batch,
                training=replace(worker.training, epochs=MEASURED_STEPS),
                generator=torch_generator(settings.seed, "memory"),
                labels=worker.labels,
            )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return ClientMemory(free, free)
    tensors = torch.accelerator.max_memory_reserved(device) - before
    return ClientMemory(free, tensors + OUTSIDE_TENSORS)


def device_failure(device: torch.device) -> str | None:
    """Compute on the device and return its error; None if it works, or if only its memory is full."""
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            return str(error).strip().partition("\n")[0]
    return None
