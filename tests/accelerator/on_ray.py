"""A run on Ray with the strict accelerator: a device for each of its logical GPUs, on a host without GPUs.

``python -m tests.accelerator.on_ray OVERRIDE...`` runs with the devices ``pretend:0`` to ``pretend:3``, after all
processes for clients have started. A worker of Ray uses the device whose number Ray has set as
``CUDA_VISIBLE_DEVICES``. After each training, and at the end of the server, a process appends a line of JSON with the
peak memory of each device to a file. Environment variables:

- ``PRETEND_TRAINED``: this file
- ``PRETEND_CPUS``: number of CPUs for clients, instead of those of this machine
- ``PRETEND_MEMORY``: bytes of each device, separated by commas
- ``PRETEND_LOST``: see `check_alive` in ``backend/device.h``
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.accelerator import device

DEVICES = 4
CPUS, LOST, MEMORY, TRAINED = "PRETEND_CPUS", "PRETEND_LOST", "PRETEND_MEMORY", "PRETEND_TRAINED"
HOOKS = Path(__file__).with_name("ray_hooks")


def _register() -> None:
    device.register(DEVICES)
    for index, num_bytes in enumerate(filter(None, os.environ.get(MEMORY, "").split(","))):
        torch.ops.pretend.set_memory(index, int(num_bytes))


def _write_peaks(**values: Any) -> None:
    peaks = [torch.accelerator.max_memory_allocated(index) for index in range(DEVICES)]
    with Path(os.environ[TRAINED]).open("a") as file:
        file.write(json.dumps({**values, "peaks": peaks}) + "\n")


def _assigned_device(name: str) -> torch.device:
    assigned = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if name == "cpu" or not assigned:
        return torch.device("cpu")
    return torch.device(device.NAME, int(assigned.split(",")[0]))


def prepare_worker() -> None:
    """Register the devices in this process, select that of its GPU for ``device=auto``, and write what it has used."""
    _register()
    from fedssl.machine import devices

    devices.select_device = _assigned_device
    torch.accelerator.set_device_index = lambda index: None  # the current device is to stay the first one
    from client_app import worker  # after the patches: functions are imported by name

    train = worker.ClientWorker.train

    @functools.wraps(train)
    def train_and_write(self: worker.ClientWorker, plan: Any, client: int, *args: Any, **kwargs: Any) -> Any:
        update = train(self, plan, client, *args, **kwargs)
        import ray

        host, visible = ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]
        _write_peaks(client=client, round=plan.round, pid=os.getpid(), host=host, visible=visible)
        return update

    worker.ClientWorker.train = train_and_write


def main() -> None:
    """Run the overrides of the command line with the devices, and draw no figures."""
    _register()
    sys.path.insert(0, str(HOOKS))  # Ray's processes get the path of this one
    from server_app.callbacks import evaluation
    from simulation import ray_grid, ray_session
    from simulation.run import run

    evaluation.write_final_plots = evaluation.save_partition_plot = lambda folder, *args, **kwargs: []
    ray_session.available_cores = lambda: int(os.environ[CPUS])
    execute = ray_grid.execute

    def execute_with_all_processes(grid: ray_grid.RayGrid, *args: Any, **kwargs: Any) -> None:
        while grid._starting:  # else the first ones could train all clients
            list(grid.pull_messages([]))
        for index in range(DEVICES):  # the validation of the settings has used the current device
            torch.accelerator.reset_peak_memory_stats(index)
        execute(grid, *args, **kwargs)

    ray_grid.execute = execute_with_all_processes
    run(sys.argv[1:])
    _write_peaks(client="server")


if __name__ == "__main__":
    main()
