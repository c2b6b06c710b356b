"""torch without its compiler, which optimizers and dispatch modes import only to be left alone by it.

The import takes as long as that of torch itself, and 100 MB, in every process that trains.
"""

from inspect import unwrap

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZER_FILE = Optimizer.profile_hook_step.__code__.co_filename  # the file whose wrappers are around every `step`


def disable_dynamo_import() -> None:
    """Mark such functions as `torch._compile._disable_dynamo` does after the import: "call it as it is"."""
    for kind in (Optimizer, *TorchDispatchMode.__subclasses__()):
        for method in vars(kind).values():
            function = getattr(method, "__wrapped__", None)
            if function is not None:
                function.__dict__.setdefault("__dynamo_disable", function)


def optimizer_step(optimizer: Optimizer) -> None:
    """A step of the optimizer, without torch's wrappers around it: hooks, a mark for its profiler, and the import."""
    with torch.no_grad():
        unwrap(type(optimizer).step, stop=lambda step: step.__code__.co_filename != OPTIMIZER_FILE)(optimizer)
