"""Avoids the import of torch's compiler, which optimizers and dispatch modes trigger only to disable it.

The import takes as long as that of torch itself, and 100 MB, in each process that trains.
"""

from inspect import unwrap

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZER_FILE = Optimizer.profile_hook_step.__code__.co_filename  # file of the wrappers around `step`


def disable_dynamo_import() -> None:
    """Mark functions as `torch._compile._disable_dynamo` does after the import, so that they are called directly."""
    for kind in (Optimizer, *TorchDispatchMode.__subclasses__()):
        for method in vars(kind).values():
            function = getattr(method, "__wrapped__", None)
            if function is not None:
                function.__dict__.setdefault("__dynamo_disable", function)


def optimizer_step(optimizer: Optimizer) -> None:
    """Run an optimizer step without torch's wrappers: hooks, profiler ranges, and the import of the compiler."""
    with torch.no_grad():
        unwrap(type(optimizer).step, stop=lambda step: step.__code__.co_filename != OPTIMIZER_FILE)(optimizer)
