"""Run in a program of the user without changing its process: environment, logging, random numbers and so on.

What stays are imported modules, and glibc's handling of freed memory (``keep_freed_memory=false`` leaves it unchanged).
"""

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_one_at_a_time = threading.RLock()

# What imports have set once, in an earlier block. It is set again in each block.
_environment: dict[str, str] = {}
_filters: list[Any] = []


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore environment, working directory, signals, warnings, loggers and import path at the end of the block.

    The blocks of several threads follow each other, because threads share all of these.
    """
    with _one_at_a_time, warnings.catch_warnings(), ExitStack() as stack:
        stack.callback(os.chdir, Path.cwd())
        stack.callback(_restore_environment, dict(os.environ))
        stack.callback(_restore_filters, list(warnings.filters))
        stack.callback(_restore_import_path, list(sys.path), Path.cwd())
        if threading.current_thread() is threading.main_thread():  # which alone may set them
            stack.callback(_restore_signals, {number: signal.getsignal(number) for number in signal.valid_signals()})
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):  # not the placeholder of a parent
                state = (list(logger.handlers), logger.level, logger.propagate, logger.disabled)
                stack.callback(_restore_logger, logger, *state)
        os.environ.update(_environment | os.environ)
        warnings.filters[:0] = [each for each in _filters if each not in warnings.filters]  # type: ignore[index]  # a list
        yield


def _restore_environment(before: dict[str, str]) -> None:
    _environment.update({name: os.environ[name] for name in os.environ.keys() - before.keys()})
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _restore_filters(before: list[Any]) -> None:
    """Store the new filters. `warnings.catch_warnings` removes them."""
    _filters[:] = [each for each in warnings.filters if each not in before]


def _restore_import_path(before: list[str], folder: Path) -> None:
    """Remove the working directory, which config directories add. Libraries need what they have added themselves."""
    if str(folder) not in before and str(folder) in sys.path:
        sys.path.remove(str(folder))


def _restore_signals(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:  # None: not set by Python
            signal.signal(number, handler)


def _restore_logger(logger: logging.Logger, handlers: Any, level: int, propagate: bool, disabled: bool) -> None:
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate, logger.disabled = propagate, disabled


@contextmanager
def _exact_products() -> Iterator[None]:
    """Compute matrix products without TF32 and bfloat16; the precision may have been set for all or by backend."""
    import torch

    backends: Sequence[Any] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]  # set at the import
    before = [backend.fp32_precision for backend in backends]
    try:
        for_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by backend
        for backend in backends:
            backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(for_all)


@contextmanager
def restored_torch() -> Iterator[None]:
    """Restore torch's threads and the generators of random numbers of Python, NumPy and torch. Imports torch.

    In the block torch has the defaults of a new process: dtype, device, precision of products, gradients, no autocast.
    """
    import numpy as np
    import torch

    from fedssl.machine.process import enable_dynamo_import

    threads, generators = torch.get_num_threads(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    gpus = torch.cuda.is_initialized()  # else there is no state yet, and device 0 is current
    device, gpu_generators = (torch.cuda.current_device(), torch.cuda.get_rng_state_all()) if gpus else (0, [])
    dtype = torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            torch.set_default_dtype(torch.float32)
            stack.enter_context(_exact_products())
            if torch.get_default_device().type != "cpu":  # each of these contexts takes time in every operation
                stack.enter_context(torch.device("cpu"))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(mode=False))
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        enable_dynamo_import()
        if torch.cuda.is_initialized():
            torch.cuda.set_device(device)
            torch.cuda.set_rng_state_all(gpu_generators)
