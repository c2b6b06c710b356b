"""Captures of steps: streams and memory of graphs, and captures that fail."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock
from weakref import finalize

import pytest
import torch

from fedssl.errors import RequestRefused
from fedssl.machine.cuda_graphs import WARMUP_STEPS, CudaGraphCache, capture_on_gpu
from fedssl.schedule.stages import set_active_stages
from tests.recorded_client import Client
from tests.recording import Recorder


def test_graphs_share_a_pool_while_one_of_them_exists(monkeypatch):
    """PyTorch's allocator counts the graphs of a pool, and refuses one whose count is back at 0."""
    opened: Counter[int] = Counter()

    class Graph:
        def replay(self):
            pass

    @contextmanager
    def graph(new, *, pool, stream, capture_error_mode):
        if pool in opened and opened[pool] == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        opened[pool] += 1
        finalize(new, lambda: opened.subtract([pool]))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", count(1).__next__)
    monkeypatch.setattr(torch.cuda, "Stream", Mock)
    client, views = Client(), [Client().views(size) for size in (4, 5)]
    cache = CudaGraphCache(client.training.optimizer, capture_on_gpu(torch.device("cuda")))
    for depth in (1, 2):
        with set_active_stages(client.method, depth=depth, frozen=depth - 1):
            cache.reset_optimizer([0.1])
            for batch in (*views,) * (WARMUP_STEPS + 1):
                cache.run(lambda views: views[0].images.sum(), batch)
    assert opened == {1: 0, 2: 2}


def test_each_trainer_captures_on_a_stream_of_its_device(monkeypatch):
    """PyTorch's own stream for captures is made once. Work of other devices is not captured by it.

    cuBLAS's memory belongs to a stream, and PyTorch frees it with any graph that was captured on it.
    """
    own = SimpleNamespace(device=torch.device("cuda", 0))
    used = []

    @contextmanager
    def graph(new, *, pool, stream=own, capture_error_mode):
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    devices = [torch.device("cuda", index) for index in (0, 1, 1)]
    captures = [capture_on_gpu(device) for device in devices]
    for capture in captures * 2:
        capture(lambda: torch.ones(()))
    assert [stream.device for stream in used] == devices * 2
    assert used[:3] == used[3:]
    assert len({id(stream) for stream in used}) == 3


class Failing(Recorder):
    """Fails as PyTorch does in a capture, which computes nothing, at the second kind of step."""

    def __init__(self, error):
        super().__init__()
        self.error, self.attempts = error, 0

    def __call__(self, step):
        if self.recorded:
            self.attempts += 1
            raise self.error
        return super().__call__(step)


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: operation not permitted")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_step_that_cannot_be_captured_is_run_without_graphs(caplog, error):
    """By default; 25 images are batches of 7, 6, 6 and 6, and those of 6 are captured first."""
    failing = Failing(error)
    recorded, plain = Client("method=byol", record=Recorder()), Client("method=byol")
    recorded.training = replace(
        recorded.training, graphs=CudaGraphCache(recorded.training.optimizer, failing, required=False)
    )
    for client in (recorded, plain):
        for _ in range(3):
            client.round(num_images=25)
    assert (failing.recorded, failing.attempts) == (1, 1)
    assert recorded.is_like(plain)
    assert caplog.messages == [f"training goes on without CUDA graphs, because a step cannot be captured: {error}"]


@pytest.mark.parametrize(("error", "raised"), [*zip(ERRORS, (torch.OutOfMemoryError, RequestRefused), strict=True)])
def test_a_requested_capture_that_fails_ends_the_training(error, raised):
    """Memory may suffice in a second attempt."""
    client = Client(record=Failing(error))
    client.round(num_images=25)
    with pytest.raises(raised, match=r"out of memory|not permitted\); set cuda_graphs=false"):
        client.round(num_images=25)
