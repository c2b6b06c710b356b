"""Settings of a process for computing: threads, glibc's memory allocator, and no import of torch's compiler.

torch is imported inside the functions, because the command reads `OPENMP_ENV` before, and settings need no torch.
"""

import ctypes
import gc
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl.config.settings import MachineSettings
from fedssl.logs import log_once
from fedssl.machine.memory import iter_cgroups

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

# Environment variables to set before torch is imported: waiting OpenMP threads spin for a tenth of a millisecond and
# then sleep. Sleeping at once makes a training step a fifth slower. Spinning longer makes training ten times slower
# instead of two times if a second program uses the same cores.
OPENMP_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}

# To set, too: both limit the threads by the machine or its load, and their number decides the order of sums.
OPENMP_THREADS = {"OMP_DYNAMIC": "false", "OMP_THREAD_LIMIT": str(2**31 - 1)}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # parameters of glibc's mallopt


def available_cores() -> int:
    """Return the number of cores that this process may use: those of its affinity, at most its containers' quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, math.ceil(min([cores, *_cpu_quotas()])))


def _cpu_quotas() -> Iterator[float]:
    """Yield the cores whose time each limit allows: those of a container or service, and of all that contain it."""
    for folder, version in iter_cgroups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no limit, "max", or not in this mount
            files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = map(int, " ".join((folder / file).read_text(encoding="ascii") for file in files).split())
            if quota > 0:  # version 1 reports no limit as -1
                yield quota / period


def max_open_files() -> int:
    """Return how many files this process may open at a time; requires Linux or macOS."""
    import resource  # here: Windows has none

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def process_age() -> float:
    """Return the seconds since the start of this process; 0 if unknown (not Linux)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def default_threads(size: int) -> int:
    """Return the number of CPU threads for images of ``size`` x ``size``: 1 below 32 pixels, else at most 4.

    Operations on smaller images finish before a second thread starts. More than 4 threads gain little on batches of
    usual size, and Ray runs clients in parallel.
    """
    return 1 if size < 32 else min(4, available_cores())


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one CPU thread inside the block, for operations shorter than the start of a second thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def set_allocator_thresholds() -> bool:
    """Make glibc keep freed memory, for all threads, instead of returning it to the kernel at once.

    Blocks over 32 MB are otherwise mapped anew on each use, and the page faults cost more than the arithmetic on them
    (batch augmentation 2.4x, training with large batches 1.5x). The price is resident memory that is not given back.
    Threads share one arena, since those that a second thread would get hold no block of that size (evaluation in a
    thread 1.5x). Returns whether it took effect (Linux with glibc).
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library, e.g. musl
        return False
    wanted = {_M_MMAP_THRESHOLD: 2**31 - 1, _M_TRIM_THRESHOLD: 2**31 - 1, _M_ARENA_MAX: 1}
    return all(mallopt(parameter, value) for parameter, value in wanted.items())


def return_freed_memory() -> None:
    """Return freed memory to the kernel, which `set_allocator_thresholds` keeps, while the process is idle (glibc).

    That of objects in reference cycles, such as a message, is freed before.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def configure_process(machine: MachineSettings) -> "torch.device":
    """Set threads and allocator, and return the device; raise `InputError` if the device does not exist."""
    import torch

    from fedssl.machine.devices import select_device

    if machine.threads > (cores := available_cores()):
        log_once(
            logging.WARNING, f"threads={machine.threads} wait for each other on {cores} cores; set threads={cores}"
        )
    torch.set_num_threads(machine.threads)
    if machine.keep_freed_memory:
        set_allocator_thresholds()
    disable_dynamo_import()
    device = select_device(machine.device)
    if device.index is not None:
        torch.accelerator.set_device_index(device)  # for random generators, streams and Triton
    return device


def disable_dynamo_import() -> None:
    """Avoid the import of torch's compiler, which optimizers and dispatch modes trigger only to disable it.

    The import takes as long as that of torch itself, and 100 MB. Functions are marked as by
    `torch._compile._disable_dynamo` after the import, so that they are called directly.
    """
    for function in _uncompiled_functions():
        function.__dict__.setdefault("__dynamo_disable", function)


def enable_dynamo_import() -> None:
    """Undo `disable_dynamo_import`, for a program that compiles optimizers itself."""
    for function in _uncompiled_functions():
        if function.__dict__.get("__dynamo_disable") is function:
            del function.__dict__["__dynamo_disable"]


def _uncompiled_functions() -> Iterator[Any]:
    from torch.optim import Optimizer
    from torch.utils._python_dispatch import TorchDispatchMode

    for kind in (Optimizer, *TorchDispatchMode.__subclasses__()):
        for method in vars(kind).values():
            function = getattr(method, "__wrapped__", None)
            if function is not None:
                yield function


def optimizer_step(optimizer: "Optimizer") -> None:
    """Run an optimizer step without torch's wrappers: hooks, profiler ranges, and the import of the compiler."""
    import torch

    wrappers = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
    with torch.no_grad():
        unwrap(type(optimizer).step, stop=lambda step: step.__code__.co_filename != wrappers)(optimizer)
