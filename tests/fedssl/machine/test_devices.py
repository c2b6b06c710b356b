"""Devices: what goes to a GPU comes from pinned memory, and nothing else is pinned."""

from unittest.mock import Mock

import pytest
import torch

from fedssl.errors import InputError
from fedssl.machine.devices import pick_device, to_device


def test_only_a_gpu_takes_from_pinned_memory():
    tensor = Mock(spec=torch.Tensor)
    gpu = torch.device("cuda")
    assert to_device(tensor, gpu) is tensor.pin_memory.return_value.to.return_value
    tensor.pin_memory.return_value.to.assert_called_once_with(gpu, non_blocking=True)
    here = torch.arange(3)
    assert to_device(here, torch.device("cpu")) is here


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="torch finds no GPU; use device=auto or device=cpu"):
        pick_device("cuda")
