"""A process made ready for computing, as the settings say."""

import torch

from fedssl.config.settings import MachineSettings
from fedssl.machine.compiler import leave_compiler_out
from fedssl.machine.devices import pick_device
from fedssl.machine.threads import tune_allocator


def set_up(machine: MachineSettings) -> torch.device:
    """Set threads and allocator, and return the device; raises `InputError` if there is no such device."""
    torch.set_num_threads(machine.threads)
    if machine.allocator:
        tune_allocator()
    leave_compiler_out()
    return pick_device(machine.device)
