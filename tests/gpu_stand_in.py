"""A CPU that is treated as a GPU: decisions that depend on the device are those for a GPU, numbers are the CPU's."""

import pytest
import torch

from fedssl.machine import device_copies, devices


def treat_cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CPU", "none")
    monkeypatch.setattr(devices, "CUDA", "cpu")
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(device_copies, "pinned_buffer", lambda size, dtype: torch.empty(size, dtype=dtype))
