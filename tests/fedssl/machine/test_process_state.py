"""Each part of the process that a block changes is as before after it, and as an import left it in the next block."""

import logging
import os
import random
import signal
import sys
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.machine import process_state
from fedssl.machine.process import disable_dynamo_import
from fedssl.machine.process_state import restored_process, restored_torch


@pytest.fixture(autouse=True)
def _nothing_set_before(monkeypatch):
    monkeypatch.setattr(process_state, "_environment", {})
    monkeypatch.setattr(process_state, "_filters", [])


def test_variables_return_in_the_next_block_unless_set(monkeypatch):
    for name, value in {"SAME": "1", "CHANGED": "1", "REMOVED": "1"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with restored_process():
        os.environ["NEW"] = os.environ["CHANGED"] = "2"
        del os.environ["REMOVED"]
    assert dict(os.environ) == before
    with restored_process():
        assert dict(os.environ) == {**before, "NEW": "2"}
    monkeypatch.setenv("NEW", "3")
    with restored_process():
        assert os.environ["NEW"] == "3"
    assert os.environ["NEW"] == "3"


def test_filters_of_warnings_return_in_the_next_block():
    before = list(warnings.filters)
    with restored_process():
        warnings.filterwarnings("ignore", message="of an import")
        (new,) = [each for each in warnings.filters if each not in before]
    assert warnings.filters == before
    for _ in range(2):
        with restored_process():
            assert warnings.filters == [new, *before]


def test_folder_and_import_path_are_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with restored_process():
        os.chdir("/")
        sys.path += [str(tmp_path), "/library"]
    assert Path.cwd() == tmp_path
    assert sys.path == [*before, "/library"]  # which a library may need later
    sys.path[:] = [*before, str(tmp_path)]
    with restored_process():
        pass
    assert sys.path.pop() == str(tmp_path)  # of the user


def test_signals_are_restored_in_the_main_thread():
    def handler(number, frame):
        pass

    before = signal.getsignal(signal.SIGTERM)
    with restored_process():
        signal.signal(signal.SIGTERM, handler)
    assert signal.getsignal(signal.SIGTERM) is before
    failures = []

    def block():
        try:
            with restored_process():
                pass
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert failures == []


def test_loggers_are_restored():
    log, handler = logging.getLogger("of a library"), logging.NullHandler()
    for logger in (log, logging.root):
        before = (list(logger.handlers), logger.level, logger.propagate, logger.disabled)
        with restored_process():
            logger.addHandler(handler)
            logger.setLevel(logging.CRITICAL)
            logger.propagate, logger.disabled = False, True
        assert (list(logger.handlers), logger.level, logger.propagate, logger.disabled) == before


def test_blocks_of_threads_follow_each_other():
    inside, most = [], []

    def block():
        with restored_process():
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()

    threads = [threading.Thread(target=block) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]
    with restored_process(), restored_process():  # in one thread
        pass


def test_threads_and_random_numbers_of_torch_are_restored():
    def state():
        return (torch.get_num_threads(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())

    threads = torch.get_num_threads()
    torch.manual_seed(1)
    before = state()
    function = torch.optim.Optimizer.zero_grad.__wrapped__
    own = vars(function).get("__dynamo_disable")
    with restored_torch():
        torch.set_num_threads(threads + 1)
        torch.manual_seed(2)
        random.seed(3)
        np.random.seed(4)
        disable_dynamo_import()
        assert vars(function)["__dynamo_disable"] is not None
    assert all(np.array_equal(one, other) for one, other in zip(before[2:], state()[2:], strict=True))
    assert before[:2] == state()[:2]
    assert vars(function).get("__dynamo_disable") is (None if own is function else own)


@pytest.mark.parametrize("used_before", [False, True])
def test_the_current_gpu_is_restored_after_its_first_use(monkeypatch, used_before):
    """Else device=cuda:1 would choose the GPU of a later run with device=cuda."""
    current, generators = [2 if used_before else 0], ["of the user"] if used_before else []
    restored, is_used = [], [used_before]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(generators))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    before = current[0]
    with restored_torch():
        is_used[0] = True
        torch.cuda.set_device(1)
    assert (current[0], restored) == (before, generators)


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def matmul_by_backend():
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@contextmanager
def matmul_precision(precision):
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "settings",
    [
        partial(matmul_precision, "medium"),
        matmul_by_backend,
        partial(default_dtype, torch.float64),
        partial(torch.device, "meta"),
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu"),
    ],
)
def test_what_torch_does_by_default_is_the_same_in_every_program(settings):
    def state():
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        precision = torch.backends.mkldnn.matmul.fp32_precision.replace("none", "ieee")  # the default
        return torch.get_default_dtype(), torch.get_default_device(), precision, *grad

    usual = state()
    with settings():
        before = state()
        assert before != usual
        with restored_torch():
            assert state() == usual
            loss = torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum()
            assert (loss.dtype, loss.requires_grad, loss.device.type) == (torch.float32, True, "cpu")
            loss.backward()
            assert (
                settings is matmul_by_backend or not torch.backends.cuda.matmul.allow_tf32
            )  # as the compiler reads it
        assert state() == before
