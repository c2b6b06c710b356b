"""A client that runs out of accelerator memory: it starts again alone, and after that gets a remedy, which is measured.

Each attempt has a new worker, so that nothing of the last one remains: weights, optimizer state, CUDA graphs and cached
memory. All random numbers are functions of seed, client and round, and the state of the client is saved at the end.
The second attempt therefore gives the numbers of an undisturbed one. It captures no CUDA graphs by default, because
they keep the memory of a step while steps of other batch sizes run without them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from hydra.utils import get_class

from client_app.worker import release_worker
from fedssl.config.settings import ClientSettings
from fedssl.errors import InputError, RequestRefused
from fedssl.logs import log
from fedssl.machine.devices import MPS, check_precision, free_memory, is_gpu, select_device
from fedssl.machine.memory import gigabytes
from fedssl.machine.out_of_memory import free_cached_memory, is_out_of_memory
from fedssl.methods.base import SSLMethod

T = TypeVar("T")
TrySteps = Callable[[int, str], None]  # trains for a few steps with a batch size and a precision

_OTHERS = 8  # other processes are named if they use more than one part in eight of the memory

_remedies: dict[object, str] = {}  # that this process has measured, by settings and stages


def run_with_retry(
    run: Callable[[ClientSettings], T],
    *,
    settings: ClientSettings,
    stages: tuple[int | None, int],
    try_steps: TrySteps,
    names_others: bool,
) -> T:
    """Return ``run(settings)``. If the accelerator runs out of memory, free it, and run again without CUDA graphs.

    Raise `RequestRefused` with a remedy if that fails as well. It is measured by ``try_steps``, once in this process
    for the settings and the active ``stages`` of the encoder. ``names_others`` states in it how much memory other
    processes use, which a device does not reveal.
    """
    for used, next_step in ((settings, "is retried alone"), (_without_graphs(settings), "is dropped")):
        try:
            return run(used)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        _start_over()
        log.warning("a client ran out of accelerator memory and %s", next_step)
    key = settings, stages
    if key not in _remedies:
        _remedies[key] = _reason(settings, try_steps, names_others=names_others)
    raise RequestRefused(_remedies[key])


def _without_graphs(settings: ClientSettings) -> ClientSettings:
    """Return settings in which no CUDA graphs are captured, unless they are requested."""
    if settings.training.cuda_graphs:
        return settings
    return replace(settings, training=replace(settings.training, cuda_graphs=False))


def _start_over() -> None:
    """Free all memory of clients. Called outside of ``except``: the error has the tensors of all its frames."""
    release_worker()
    free_cached_memory()


def _reason(settings: ClientSettings, try_steps: TrySteps, *, names_others: bool) -> str:
    training, device = settings.training, select_device(settings.machine.device)
    remedies, smallest = [], smallest_batch(settings)
    batch_size = training.batch_size // 2
    while batch_size >= smallest and not _fits(try_steps, batch_size, training.precision):
        batch_size //= 2
    if batch_size >= smallest:
        remedies.append(f"batch_size={batch_size}")
    if training.precision == "fp32" and _supports_bf16(device) and _fits(try_steps, training.batch_size, "bf16"):
        remedies.append("precision=bf16")
    found = f"batch_size={training.batch_size} and precision={training.precision} do not fit into accelerator memory"
    remedy = f"set {' or '.join(remedies)}, which fits" if remedies else "no batch_size fits; set a smaller encoder"
    others, total = _memory_of_others(device) if names_others else (0, 0)
    if _OTHERS * others > total:
        used = f"{gigabytes(others)} of {gigabytes(total)}"
        remedy += f", or free the {used} that other processes use (fewer clients per GPU: engine.client_gpus=1)"
    return f"{found}; {remedy}"


def smallest_batch(settings: ClientSettings) -> int:
    """Return the smallest batch size that the method accepts."""
    method: type[SSLMethod] = get_class(settings.model.method.target)
    return method.min_batch_size


def _fits(try_steps: TrySteps, batch_size: int, precision: str) -> bool:
    fits = True
    try:
        try_steps(batch_size, precision)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    _start_over()
    return fits


def _supports_bf16(device: torch.device) -> bool:
    try:
        check_precision("bf16", device)
    except InputError:
        return False
    return True


def _memory_of_others(device: torch.device) -> tuple[int, int]:
    """Return the bytes that other processes use on an accelerator with its own memory, and its total; else zeros."""
    if not is_gpu(device) or device.type == MPS:
        return 0, 0
    total = torch.accelerator.get_memory_info(device)[1]
    return total - free_memory(device) - torch.accelerator.memory_reserved(device), total
