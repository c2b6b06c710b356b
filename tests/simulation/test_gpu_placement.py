"""Memory of a client that is measured on a GPU, with a stand-in for torch's allocator."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedssl.machine.cuda_graphs import WARMUP_STEPS
from simulation import gpu_placement
from simulation.gpu_placement import OUTSIDE_TENSORS, client_memory


@dataclass(frozen=True)
class Training:
    graphs: object
    epochs: int = 1
    batch_size: int = 8


class Allocator:
    """Memory of captured and of other steps, one byte per image. A capture frees that of the others before."""

    def __init__(self, monkeypatch):
        self.captured = self.others = self.peak = 0
        for name in ("memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.accelerator, name, lambda device, name=name: self.peak)

    def train(self, method, images, indices, *, training, generator, labels):
        for step in range(training.epochs):
            if training.graphs is None or step < WARMUP_STEPS:
                self.others = max(self.others, len(indices))
            elif step == WARMUP_STEPS:
                self.captured, self.others = max(self.captured, len(indices)), 0
            self.peak = max(self.peak, self.captured + self.others)


@pytest.mark.parametrize(("graphs", "expected"), [(None, 8), (object(), 8 + 7)])
def test_memory_of_a_client_includes_steps_beside_captured_ones(monkeypatch, graphs, expected):
    """Clients have batches of several sizes, which are captured one after the other."""
    allocator = Allocator(monkeypatch)
    worker = SimpleNamespace(
        client_indices=[np.arange(5), np.arange(20)],
        training=Training(graphs),
        method=SimpleNamespace(min_batch_size=2),
        images=None,
        labels=None,
    )
    settings = SimpleNamespace(machine=SimpleNamespace(device="cuda"), seed=0)
    for name, value in {
        "parse_client_config": lambda client_yaml: settings,
        "select_device": torch.device,
        "free_memory": lambda device: 100,
        "ClientWorker": lambda settings: worker,
        "train": allocator.train,
    }.items():
        monkeypatch.setattr(gpu_placement, name, value)
    memory = client_memory("")
    assert memory.each == OUTSIDE_TENSORS + expected
