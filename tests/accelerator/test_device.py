"""The strict accelerator itself: it computes as the CPU, refuses what a GPU refuses, and counts copies and waits."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.accelerator.device import NAME, limited_memory, recorded

OTHER = f"{NAME}:1"  # not the current device

MIXTURES = {
    "sum": lambda here, there: here + there,
    "in place": lambda here, there: here.add_(there),
    "in place on the host": lambda here, there: there.add_(here),
    "number of the host": lambda here, there: torch.zeros(()).add_(here.sum()),
    "product": lambda here, there: here @ there.T,
    "linear": lambda here, there: F.linear(here, there),
    "loss": lambda here, there: F.mse_loss(here, there),
    "classes": lambda here, there: F.cross_entropy(here, torch.tensor([0, 1, 2, 0])),
    "cat": lambda here, there: torch.cat([here, there]),
    "stack": lambda here, there: torch.stack([there, here]),
    "where": lambda here, there: torch.where(here > 0, here, there),
    "rows": lambda here, there: here.index_select(0, torch.tensor([1])),
    "gather": lambda here, there: here.gather(1, torch.zeros(4, 1, dtype=torch.int64)),
    "lists": lambda here, there: torch._foreach_add([here], [there]),
    "devices": lambda here, there: here + there.to(f"{NAME}:0"),
    "convolution": lambda here, there: F.conv2d(here.view(1, 1, 4, 3), there.view(1, 1, 4, 3)),
    "layer norm": lambda here, there: F.layer_norm(here, [3], torch.ones(3)),
    "optimizer": lambda here, there: torch._fused_sgd_(
        *([here], [there], []), weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    ),
}  # fmt: skip


def refused(what: str) -> str:
    """Return the error of an operation on a tensor here and one there."""
    there = torch.ones(4, 3)
    try:
        MIXTURES[what](there.to(OTHER), there)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", MIXTURES)
def test_operands_of_two_devices_are_refused(accelerator, what):
    error = accelerator(refused, what).result()
    assert error.startswith("Expected all tensors to be on the same device, but found at least two devices, ")
    assert OTHER in error


def test_the_host_reads_no_tensor_of_the_device(accelerator):
    with pytest.raises(TypeError, match=f"can't convert {OTHER} device type tensor to numpy. Use Tensor.cpu()"):
        accelerator(_as_array).result()


def _as_array() -> None:
    torch.ones(3, device=OTHER).numpy()


def test_generators_of_the_host_are_refused(accelerator):
    with pytest.raises(RuntimeError, match=f"Expected a '{NAME}' device type for generator but found 'cpu'"):
        accelerator(_draw_with_host).result()


def _draw_with_host() -> None:
    torch.randn(3, device=OTHER, generator=torch.Generator())


def train(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Train a network with most kinds of layers for three steps; return its tensors and its last output."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 2, bias=False)),
        *(nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.LayerNorm(16)),
        *(nn.GELU(), nn.Linear(16, 5)),
    )
    images, classes = torch.randn(12, 3, 8, 8), torch.arange(12) % 5
    network, images, classes = network.to(device), images.to(device), classes.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = network(images)
            loss = F.cross_entropy(output.float(), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
    assert output.dtype == dtype
    return [value.cpu() for value in (*network.state_dict().values(), output.detach())]


def test_training_gives_the_bits_of_the_cpu(accelerator):
    there = accelerator(train, OTHER)
    assert all(torch.equal(*pair) for pair in zip(train("cpu"), there.result(), strict=True))


def test_copies_and_waits_are_counted(accelerator):
    events = accelerator(_transfers).result()
    both = {"synchronize": 1}
    assert events == {
        "to_device": {"to_device": 1} | both,
        "from pinned memory": {"to_device": 1},
        "without waiting, from other memory": {"to_device": 1} | both,
        "to_host": {"to_host": 1} | both,
        "to_host without waiting": {"to_host": 1},
        "between": {"between_devices": 1} | both,
        "made from a list": {"to_device": 1} | both,
        "indices of the host": {"to_device": 1} | both,
        "on the device": {},
        "item": both,
        "mask": both,
        "bool": both,
        "synchronize": both,
        "event": both,
    }


def _transfers() -> dict[str, dict[str, int]]:
    here, there, pinned = torch.ones(3), torch.ones(3, device=OTHER), torch.ones(3).pin_memory()
    mark = torch.Event(OTHER)
    mark.record(torch.accelerator.current_stream(1))
    actions = {
        "to_device": lambda: here.to(OTHER),
        "from pinned memory": lambda: pinned.to(OTHER, non_blocking=True),
        "without waiting, from other memory": lambda: here.to(OTHER, non_blocking=True),
        "to_host": lambda: there.cpu(),
        "to_host without waiting": lambda: there.to("cpu", non_blocking=True),
        "between": lambda: there.to(f"{NAME}:0"),
        "made from a list": lambda: torch.tensor([1.0, 2.0], device=OTHER),
        "indices of the host": lambda: there[torch.tensor([0, 1])],
        "on the device": lambda: (there + there.clone()).mul_(2).sum(),
        "item": lambda: there.sum().item(),
        "mask": lambda: there[there > 0],
        "bool": lambda: bool(there.isfinite().all()),
        "synchronize": lambda: torch.accelerator.synchronize(1),
        "event": mark.synchronize,
    }
    counts = {}
    for name, action in actions.items():
        with recorded() as events:
            action()
        counts[name] = dict(Counter(event.kind for event in events))
    return counts


def test_memory_is_counted_and_limited(accelerator):
    used, peak, free = accelerator(_memory).result()
    assert (used, peak) == (4000, 8000)
    assert free == 2000
    with pytest.raises(torch.OutOfMemoryError, match="pretend out of memory. Tried to allocate 4000 bytes"):
        accelerator(_too_much).result()
    assert accelerator(_memory).result() == (4000, 8000, 2000)


def _memory() -> tuple[int, int, int]:
    before = torch.accelerator.memory_allocated(OTHER)
    torch.accelerator.reset_peak_memory_stats(OTHER)
    first, second = torch.zeros(1000, device=OTHER), torch.zeros(1000, device=OTHER)
    del second
    with limited_memory(torch.device(OTHER), before + 6000):
        free, _ = torch.accelerator.get_memory_info(OTHER)
    used = torch.accelerator.memory_allocated(OTHER) - before
    return used + 0 * len(first), torch.accelerator.max_memory_allocated(OTHER) - before, free


def _too_much() -> None:
    before = torch.accelerator.memory_allocated(OTHER)
    with limited_memory(torch.device(OTHER), before + 3000):
        torch.zeros(1000, device=OTHER)
