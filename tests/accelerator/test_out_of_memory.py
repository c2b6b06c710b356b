"""Too little memory of an accelerator: a client starts again or gets a remedy, evaluation uses less or the CPU."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from client_app import memory_retry, worker
from fedssl import training
from fedssl.config.load import compose, parse_client_config
from fedssl.datasets.images import TensorImages
from fedssl.evaluation.features import extract
from fedssl.machine import cuda_graphs, devices
from fedssl.machine.device_copies import copy_from_cpu, copy_to_cpu
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_layers
from server_app.collapse_monitor import CollapseMonitor
from simulation.run import run
from tests.accelerator.device import NAME, limited_memory
from tests.accelerator.results import assert_equal, numbers_of
from tests.accelerator.test_runs import BASE, EVALUATED, ONCE, as_on_accelerator  # noqa: F401, a fixture

DEVICE = f"{NAME}:1"  # not the current one
SMALL = [*BASE, "encoder.width=4", "channels_last=false", "augmentation=none"]
STATEFUL = [*SMALL, "method=byol", "strategy=fedu"]
GRAPHS = ["cuda_graphs=true", "optimizer.fused=true", "batch_size=5"]
# Clients of different sizes, each with one batch per epoch. The first round is enough.
UNEQUAL = [*SMALL, "rounds=1", "partition=dirichlet", "partition.alpha=1", "method=simclr", "strategy=fedavg"]
UNEQUAL += ["batch_size=64"]
TOTAL = 2**34


def used() -> int:
    return torch.accelerator.memory_allocated(DEVICE)


def limit(num_bytes: int) -> Any:
    """Limit the memory of the device to the allocated memory and ``num_bytes``."""
    return limited_memory(torch.device(DEVICE), used() + num_bytes)


def capture_nothing(device: torch.device) -> cuda_graphs.Capture:
    """Return a function that replays a step by running it, into the same result."""

    def capture(step):
        result = step().clone()
        return lambda: result.copy_(step()), result

    return capture


def run_and_log(overrides: list[str], folder: Path) -> str:
    """Run, without what only CUDA has, and return the log."""
    anywhere = [patch.object(module, "check_cuda_features", lambda *_: None) for module in (training, devices)]
    with anywhere[0], anywhere[1], patch.object(cuda_graphs, "capture_on_gpu", capture_nothing):
        run([*overrides, f"output_dir={folder}"])
    worker.release_worker()
    return (folder / "run.log").read_text()


@contextmanager
def full_at(step: int) -> Iterator[list[int]]:
    """Let the device be full after some operators of a training step, until memory is freed.

    Yield how much memory is used before the first worker is built, when the step starts, and when memory is freed.
    """
    seen: list[int] = []
    steps = iter(range(10**6))
    build, train, free = worker.ClientWorker, worker.train, memory_retry.free_cached_memory

    def on_step() -> None:
        if next(steps) == step:
            seen.append(used())
            torch.ops.pretend.set_memory(1, used() + 20_000)

    def freed() -> None:
        seen.append(used())
        torch.ops.pretend.set_memory(1, TOTAL)
        free()

    def built(settings) -> worker.ClientWorker:
        seen.extend([] if seen else [used()])
        return build(settings)

    def train_until_full(*args: Any, **options: Any) -> training.TrainResult:
        return train(*args, **{**options, "on_step_start": on_step})

    with (
        patch.object(worker, "train", train_until_full),
        patch.object(worker, "ClientWorker", built),
        patch.object(memory_retry, "free_cached_memory", freed),
    ):
        yield seen


def run_full_at(overrides: list[str], folder: Path, step: int) -> tuple[str, list[int]]:
    worker.release_worker()
    with full_at(step) as seen:
        return run_and_log(overrides, folder), seen


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("step", "overrides"),
    [
        (9, []),  # of the second round, in which clients have a state
        pytest.param(1, [], marks=pytest.mark.heavy),
        pytest.param(4, GRAPHS, marks=pytest.mark.heavy),  # the capture
        pytest.param(5, GRAPHS, marks=pytest.mark.heavy),  # a replay
    ],
)
def test_a_retried_client_gives_the_numbers_of_an_undisturbed_run(accelerator, tmp_path, step, overrides):
    overrides = [*STATEFUL, *overrides]
    log, (before, at_step, after) = accelerator(run_full_at, overrides, tmp_path / "full", step).result()
    assert log.count("a client ran out of accelerator memory and is retried alone") == 1
    assert "dropped" not in log
    assert before < at_step
    assert after == before  # nothing of the failed attempt remains
    accelerator(run_and_log, overrides, tmp_path / "undisturbed").result()
    assert_equal(numbers_of(tmp_path / "full"), numbers_of(tmp_path / "undisturbed"))


def peaks_of(overrides: list[str], folder: Path) -> dict[int, int]:
    """Return the peak memory of the clients of a run by their number of images."""
    peaks, train = {}, worker.train
    worker.release_worker()

    def measured(*args: Any, **options: Any) -> training.TrainResult:
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        result = train(*args, **options)
        peaks[result.num_examples] = torch.accelerator.max_memory_allocated(DEVICE)
        return result

    with patch.object(worker, "train", measured):
        run_and_log(overrides, folder)
    return peaks


def run_limited(overrides: list[str], folder: Path, total: int) -> str:
    with limited_memory(torch.device(DEVICE), total), patch.object(memory_retry, "_remedies", {}):
        return run_and_log(overrides, folder)


def test_a_client_beyond_memory_is_dropped_with_a_smaller_batch(accelerator, tmp_path):
    """The largest of three clients does not fit. The others are aggregated, and with the remedy all are."""
    peaks = accelerator(peaks_of, UNEQUAL, tmp_path / "measured").result()
    *_, second, largest = sorted(peaks)
    total = (peaks[second] + peaks[largest]) // 2
    log = accelerator(run_limited, UNEQUAL, tmp_path / "dropped", total).result()
    assert "is retried alone" in log
    (line,) = map(json.loads, (tmp_path / "dropped" / "metrics.jsonl").read_text().splitlines())
    ((_, reason),) = line["dropped"].items()
    found = "batch_size=64 and precision=fp32 do not fit into accelerator memory; set "
    remedies = reason.partition(found)[2].partition(", which fits")[0].split(" or ")
    assert [remedy.partition("=")[0] for remedy in remedies] in (["batch_size"], ["batch_size", "precision"])
    assert sorted(json.loads(line)["examples"] for line in _lines(tmp_path / "dropped")) == sorted(peaks)[:-1]
    for number, remedy in enumerate(remedies):
        folder = tmp_path / f"remedy-{number}"
        assert "dropped" not in accelerator(run_limited, [*UNEQUAL, remedy], folder, total).result()
        assert len(_lines(folder)) == 3


def _lines(folder: Path) -> list[str]:
    return (folder / "clients.jsonl").read_text().splitlines()


def test_without_a_fitting_batch_the_reason_names_a_smaller_encoder(tmp_path):
    tried = []

    def try_steps(batch_size: int, precision: str) -> None:
        tried.append((batch_size, precision))
        raise torch.OutOfMemoryError("full")

    settings = compose([*SMALL, "batch_size=10", "device=cpu", f"output_dir={tmp_path}"])
    settings = parse_client_config(settings.client_yaml)
    reason = memory_retry._reason(settings, try_steps, names_others=False)
    expected = "batch_size=10 and precision=fp32 do not fit into accelerator memory; no batch_size fits; set a smaller"
    assert reason == f"{expected} encoder"
    assert tried == [(5, "fp32"), (2, "fp32"), (10, "bf16")]


def copy_without_memory() -> list[Tensor]:
    """Copy two tensors to a device without memory for a buffer, and back."""
    sources = [torch.arange(6.0).view(2, 3), torch.arange(5.0)]
    targets = [torch.zeros_like(source, device=DEVICE) for source in sources]
    with limit(8):
        copy_from_cpu(targets, sources)
        return copy_to_cpu(targets)


def test_layers_are_copied_singly_without_memory_for_a_buffer(accelerator):
    first, second = accelerator(copy_without_memory).result()
    assert torch.equal(first, torch.arange(6.0).view(2, 3))
    assert torch.equal(second, torch.arange(5.0))


LIMITS = {"smaller chunks": (600_000, "in chunks of "), "the CPU": (30_000, "on the CPU")}


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the lines of the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fedssl").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("fedssl").removeHandler(handler)


def represent(num_bytes: int | None) -> tuple[Tensor, list[str], bool]:
    """Return representations, the log, and whether the encoder is still on its device, with limited memory or a CPU."""
    method = build_method(compose(SMALL).model)
    images = torch.arange(300 * 28 * 28).remainder(251).to(torch.uint8).view(300, 1, 28, 28)
    device = torch.device("cpu" if num_bytes is None else DEVICE)
    method.to(device)
    names = {name: tensor.data_ptr() for name, tensor in method.named_tensors.items()}
    with logged() as lines, nullcontext() if num_bytes is None else limit(num_bytes):
        h = extract(method.encoder, TensorImages(images), mean=[0.5], std=[0.5], device=device)
    state = {name: value.data_ptr() for name, value in method.state_dict().items()}
    return h, lines, state == names and all(value.device == device for value in method.state_dict().values())


@pytest.mark.parametrize("what", LIMITS)
def test_representations_are_computed_with_less_memory(accelerator, what):
    num_bytes, expected = LIMITS[what]
    h, lines, unchanged = accelerator(represent, num_bytes).result()
    assert len(lines) == 1
    assert lines[0].startswith(f"{DEVICE} has too little memory: representations are computed {expected}")
    assert unchanged
    assert torch.equal(h, represent(None)[0])


def diagnosed(num_bytes: int | None) -> tuple[dict[str, float], list[str]]:
    """Return the diagnostics of a global model and the log, with limited memory of the device or on a CPU."""
    settings = compose([*SMALL, "method=dino"])
    method = build_method(settings.model).to("cpu" if num_bytes is None else DEVICE)
    device = next(method.parameters()).device
    views = settings.training.augmentation.instantiate()
    monitor = CollapseMonitor(method, data=settings.data, num_images=64, augment=views, device=device, seed=0)
    layers = exchanged_layers(method)
    with logged() as lines, nullcontext() if num_bytes is None else limit(num_bytes):
        report = monitor.finish({"global": layers}, used=())
    return {name: report.rows[0][name] for name in ("assignment_entropy", "prototype_entropy")}, lines


def test_failures_are_diagnosed_with_less_memory(accelerator):
    found, lines = accelerator(diagnosed, 30_000).result()
    assert any(line.endswith("has too little memory: failures are diagnosed on the CPU") for line in lines)
    assert found == pytest.approx(diagnosed(None)[0], rel=1e-5)
