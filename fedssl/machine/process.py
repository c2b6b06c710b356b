"""Process-wide settings for computing."""

import torch

from fedssl.config.settings import MachineSettings
from fedssl.machine.compiler import disable_dynamo_import
from fedssl.machine.devices import select_device
from fedssl.machine.threads import tune_allocator


def configure_process(machine: MachineSettings) -> torch.device:
    """Set threads and allocator, and return the device; raise `InputError` if the device does not exist."""
    torch.set_num_threads(machine.threads)
    if machine.keep_freed_memory:
        tune_allocator()
    disable_dynamo_import()
    return select_device(machine.device)
