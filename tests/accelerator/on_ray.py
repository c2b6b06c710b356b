"""A run on Ray with the strict accelerator: a device for each of its logical GPUs, on a host without GPUs.

``python -m tests.accelerator.on_ray OVERRIDE...`` runs with the devices ``pretend:0`` to ``pretend:3``. A worker of Ray
uses the device whose number Ray has set as ``CUDA_VISIBLE_DEVICES``, and appends a line of JSON to the file
`TRAINED` in the environment after each training: the client, and the peak memory of each device. Devices have the bytes
of `MEMORY` in the environment, separated by commas. `backend/device.h` reads ``PRETEND_LOST``.
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
MEMORY, TRAINED = "PRETEND_MEMORY", "PRETEND_TRAINED"
HOOKS = Path(__file__).with_name("ray_hooks")


def _register() -> None:
    device.register(DEVICES)
    for index, num_bytes in enumerate(filter(None, os.environ.get(MEMORY, "").split(","))):
        torch.ops.pretend.set_memory(index, int(num_bytes))


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
        peaks = [torch.accelerator.max_memory_allocated(index) for index in range(DEVICES)]
        line = {"client": client, "round": plan.round, "pid": os.getpid(), "peaks": peaks}
        with Path(os.environ[TRAINED]).open("a") as file:
            file.write(json.dumps(line | {"visible": os.environ["CUDA_VISIBLE_DEVICES"]}) + "\n")
        return update

    worker.ClientWorker.train = train_and_write


def main() -> None:
    """Run the overrides of the command line with the devices, and draw no figures."""
    _register()
    sys.path.insert(0, str(HOOKS))  # Ray's processes get the path of this one
    from server_app import recorder
    from simulation.cli import run

    recorder.write_final_plots = recorder.save_partition_plot = lambda folder, *args, **kwargs: []
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
