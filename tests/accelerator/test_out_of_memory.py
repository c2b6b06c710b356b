"""Too little memory of an accelerator: clients start again or get a remedy, evaluation uses smaller chunks or the CPU."""

import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from client_app import memory_retry, worker
from fedssl import training
from fedssl.evaluation import features
from fedssl.machine import out_of_memory
from fedssl.machine.cuda_graphs import CudaGraphCache
from simulation.cli import run
from tests.accelerator.device import NAME, limited_memory
from tests.accelerator.results import assert_equal, numbers_of
from tests.accelerator.test_runs import BASE, EVALUATED, RUNS

DEVICE = f"{NAME}:1"  # not the current one
SMALL = [*BASE, "encoder.width=4", "channels_last=false", "augmentation=none"]
STATEFUL = [*SMALL, "method=byol", "strategy=fedu"]
TOTAL = 2**34


def used() -> int:
    gc.collect()
    return torch.accelerator.memory_allocated(DEVICE)


@contextmanager
def full_at(step: int) -> Iterator[list[int]]:
    """Let other processes fill the device at a training step of the run until memory is freed; yield what is used then.

    The first number is the memory in use when the step started, the second the memory when it was freed.
    """
    seen: list[int] = []
    steps = iter(range(10**6))
    train, free = worker.train, out_of_memory.free_cached_memory

    def on_step() -> None:
        if next(steps) == step:
            seen.append(torch.accelerator.memory_allocated(DEVICE))
            torch.ops.pretend.set_memory(1, seen[0] + 20_000)  # fails after some operators

    def freed() -> None:
        seen.append(torch.accelerator.memory_allocated(DEVICE))
        torch.ops.pretend.set_memory(1, TOTAL)
        free()

    def train_until_full(*args: Any, **options: Any) -> training.TrainResult:
        return train(*args, **{**options, "on_step_start": on_step})

    with patch.object(worker, "train", train_until_full), patch.object(memory_retry, "free_cached_memory", freed):
        yield seen


def run_and_log(overrides: list[str], folder: Path) -> str:
    run([*overrides, f"output_dir={folder}"])
    worker.release_worker()
    return (folder / "run.log").read_text()


def run_full_at(overrides: list[str], folder: Path, step: int) -> tuple[str, int, list[int]]:
    worker.release_worker()
    before = used()
    with full_at(step) as seen:
        return run_and_log(overrides, folder), before, seen


@pytest.mark.parametrize("step", [1, pytest.param(9, marks=pytest.mark.heavy)])
def test_a_client_that_is_retried_gives_the_numbers_of_an_undisturbed_run(accelerator, tmp_path, step):
    """Two steps of a client's round are lost; its state is that of the round before."""
    log, before, seen = accelerator(run_full_at, STATEFUL, tmp_path / "gpu", step).result()
    run([*STATEFUL, "device=cpu", f"output_dir={tmp_path / 'cpu'}"])
    assert "a client ran out of accelerator memory and is retried alone" in log
    assert "dropped" not in log
    assert len(seen) == 2
    assert_equal(numbers_of(tmp_path / "gpu"), numbers_of(tmp_path / "cpu"))
