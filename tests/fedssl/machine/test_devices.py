"""Devices: any accelerator of torch is found by its name, and nothing else is copied from pinned memory."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.machine import process
from fedssl.machine.devices import (
    check_cuda_features,
    check_precision,
    count_accelerators,
    free_memory,
    select_device,
    to_device,
    visible_devices,
)
from fedssl.methods.base import build_method
from fedssl.seeding import seed_generators
from fedssl.training import LocalTrainer


def install(monkeypatch, kind, count):
    """Let torch have this number of accelerators of a kind; None for a machine without one."""
    accelerator = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(("free", "moves"), [(199, False), (200, True)])
@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_images_go_to_a_gpu_with_memory_left(monkeypatch, kind, free, moves):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (free, 1000))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 1000 - free)
    assert free_memory(torch.device(kind)) == free
    images = TensorImages(torch.zeros(100, 1, 1, 1, dtype=torch.uint8))
    moved = Mock()
    monkeypatch.setattr(images, "to", moved)
    assert images.place(torch.device(kind)) is (moved.return_value if moves else images)


@pytest.mark.parametrize(
    ("kind", "count", "name", "expected"),
    [
        (None, 0, "auto", "cpu"),
        (None, 0, "cpu", "cpu"),
        ("cuda", 2, "auto", "cuda"),
        ("cuda", 2, "cpu", "cpu"),
        ("cuda", 2, "cuda", "cuda"),
        ("cuda", 2, "cuda:1", "cuda:1"),
        ("xpu", 1, "auto", "xpu"),
        ("mps", 1, "mps", "mps"),
    ],
)
def test_a_device_is_found_by_its_name(monkeypatch, kind, count, name, expected):
    install(monkeypatch, kind, count)
    assert select_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "count", "name", "visible"),
    [
        (None, 0, "cuda", "cpu"),
        (None, 0, "gpu", "cpu"),
        ("cuda", 2, "cuda:2", "cpu, cuda:0, cuda:1"),
        ("cuda", 2, "mps", "cpu, cuda:0, cuda:1"),
        ("mps", 1, "cuda", "cpu, mps:0"),
        ("xpu", 1, "cpu:1", "cpu, xpu:0"),
        ("xpu", 1, "xpu:-1", "cpu, xpu:0"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, kind, count, name, visible):
    install(monkeypatch, kind, count)
    assert visible_devices() == visible.split(", ")
    message = f"device={name} but torch has {visible} only; set one of these, or device=auto"
    with pytest.raises(InputError) as refused:
        select_device(name)
    assert str(refused.value) == message


@pytest.mark.parametrize(("name", "chosen"), [("cuda", []), ("cuda:1", [torch.device("cuda:1")])])
def test_a_process_computes_on_its_device(monkeypatch, name, chosen):
    install(monkeypatch, "cuda", 2)
    found = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    machine = replace(compose([]).machine, device=name, threads=torch.get_num_threads(), keep_freed_memory=False)
    assert process.configure_process(machine) == torch.device(name)
    assert found == chosen


def test_bf16_is_refused_where_torch_disables_it(monkeypatch):
    check_precision("bf16", torch.device("cpu"))
    check_precision("fp32", torch.device("mps"))
    install(monkeypatch, "mps", 1)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "cpu")
    with pytest.raises(InputError, match=r"precision=bf16 .* device cpu \(torch has cpu, mps:0\); set precision=fp32"):
        check_precision("bf16", torch.device("cpu"))
    monkeypatch.setattr(torch, "autocast", Mock(side_effect=RuntimeError("no bfloat16 here")))
    with pytest.raises(InputError, match="precision=bf16 is not supported by the device mps"):
        check_precision("bf16", torch.device("mps"))


@pytest.mark.parametrize("setting", ["cuda_graphs=true", "gpu_augmentation=triton"])
def test_graphs_and_triton_need_cuda(monkeypatch, setting):
    install(monkeypatch, "xpu", 1)
    settings = compose([setting, "optimizer.fused=true"]).training
    check_cuda_features(settings, torch.device("cuda:1"))
    check_cuda_features(compose([]).training, torch.device("xpu"))
    message = f"{setting} needs device=cuda but the device is xpu .torch has cpu, xpu:0.; set {setting.split('=')[0]}="
    with pytest.raises(InputError, match=message):
        check_cuda_features(settings, torch.device("xpu"))


def test_a_trainer_is_refused_what_its_device_cannot_do(monkeypatch):
    """The weights are on torch's device without memory, which stands in for an accelerator that is not CUDA."""
    monkeypatch.setattr("fedssl.training.is_gpu", lambda device: True)
    install(monkeypatch, "xpu", 1)
    settings = compose(["cuda_graphs=true", "optimizer.fused=true", "dataset=digits"])
    method = build_method(settings.model)
    with pytest.raises(InputError, match="cuda_graphs=true needs device=cuda but the device is cpu"):
        LocalTrainer.build(settings.training, method)
    monkeypatch.setattr("fedssl.training.check_precision", Mock(side_effect=InputError("no bf16")))
    with pytest.raises(InputError, match="no bf16"):
        LocalTrainer.build(settings.training, method)


@pytest.mark.parametrize(("name", "number"), [("auto", 3), ("xpu", 3), ("xpu:2", 1), ("cpu", 0)])
def test_accelerators_are_counted(monkeypatch, name, number):
    install(monkeypatch, "xpu", 3)
    assert count_accelerators(name) == number


def test_only_a_gpu_takes_from_pinned_memory():
    tensor = Mock(spec=torch.Tensor)
    for gpu in (torch.device("cuda"), torch.device("xpu"), torch.device("mps")):
        assert to_device(tensor, gpu) is tensor.pin_memory.return_value.to.return_value
        tensor.pin_memory.return_value.to.assert_called_with(gpu, non_blocking=True)
    here = torch.arange(3)
    assert to_device(here, torch.device("cpu")) is here


def test_the_generators_of_device_and_cpu_are_seeded(monkeypatch):
    seeded = []
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "manual_seed", lambda seed, kind=kind: seeded.append((kind, seed)))
        torch.default_generator.manual_seed(0)
        seed_generators(5, torch.device(kind))
        assert torch.initial_seed() == 5
    assert seeded == [("cuda", 5), ("xpu", 5), ("mps", 5)]
    torch.default_generator.manual_seed(0)
    seed_generators(5, torch.device("cpu"))
    assert torch.initial_seed() == 5
    assert len(seeded) == 3
