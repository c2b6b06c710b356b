"""Patches by which the project uses the strict accelerator in a process that has it, all in one place."""

from pathlib import Path

import torch

from fedssl.machine import devices
from tests.accelerator.device import NAME

DEVICE = torch.device(NAME, 1)  # not the current one: what is created on the current device is on the wrong one


def _select_device(name: str) -> torch.device:
    return torch.device("cpu") if name == "cpu" else DEVICE


def prepare() -> None:
    """Select the device for ``device=auto``, and draw no figures at the end of runs."""
    devices.select_device = _select_device
    torch.accelerator.set_device_index = lambda index: None  # of a process; the device is to stay another one
    from server_app.callbacks import evaluation  # after the patches: functions are imported by name

    def write_nothing(folder: Path, *args: object, **kwargs: object) -> list[Path]:
        return []

    evaluation.write_final_plots = evaluation.save_partition_plot = write_nothing
