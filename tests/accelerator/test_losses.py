"""Losses on an accelerator have the gradients of the CPU, and the host does not wait for the device."""

from collections import Counter

import pytest
import torch

from tests.accelerator.device import NAME, recorded
from tests.fedssl.losses.examples import LOSSES
from tests.fedssl.losses.vectors import draw

OTHER = f"{NAME}:1"  # not the current device


def events_of(name: str) -> Counter:
    """Return the events of a loss and its gradient on the device, after a comparison with those of the CPU."""
    here = [z.float().requires_grad_() for z in draw(16, 32)]
    there = [z.detach().to(OTHER).requires_grad_() for z in here]
    with recorded() as events:
        on_device = LOSSES[name](*there)
        on_device.backward()
    expected = LOSSES[name](*here)
    expected.backward()
    torch.testing.assert_close(on_device.cpu(), expected)
    for z, other in zip(here, there, strict=True):
        assert (z.grad is None) == (other.grad is None)
        torch.testing.assert_close(other.grad if other.grad is None else other.grad.cpu(), z.grad)
    return Counter(event.kind for event in events)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_do_not_wait_for_the_device(accelerator, name):
    """Only SIGReg copies something: its directions."""
    assert accelerator(events_of, name).result() == ({"to_device": 1} if name == "sigreg" else {})
