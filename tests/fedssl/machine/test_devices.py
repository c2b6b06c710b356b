"""Devices: what goes to a GPU comes from pinned memory, and nothing else is pinned."""

from unittest.mock import Mock

import pytest
import torch

from fedssl.errors import InputError
from fedssl.machine.devices import place_images, select_device, to_device


def test_only_a_gpu_takes_from_pinned_memory():
    tensor = Mock(spec=torch.Tensor)
    gpu = torch.device("cuda")
    assert to_device(tensor, gpu) is tensor.pin_memory.return_value.to.return_value
    tensor.pin_memory.return_value.to.assert_called_once_with(gpu, non_blocking=True)
    here = torch.arange(3)
    assert to_device(here, torch.device("cpu")) is here


@pytest.mark.parametrize(("free", "moves"), [(199, False), (200, True)])
def test_images_go_to_a_gpu_if_they_leave_half_of_its_free_memory(monkeypatch, free, moves):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    images = Mock(spec=torch.Tensor, nbytes=100)
    assert place_images(images, torch.device("cuda")) is (images.to.return_value if moves else images)


def test_on_a_cpu_images_stay():
    images = torch.arange(12).view(6, 2)
    assert place_images(images, torch.device("cpu")) is images


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == select_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="torch finds no GPU; use device=auto or device=cpu"):
        select_device("cuda")
