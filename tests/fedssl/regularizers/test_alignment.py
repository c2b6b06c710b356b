"""FeatARC's alignment by hand, and which encoders it compares and trains."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.losses import info_nce
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.alignment import Alignment, alignment
from fedssl.regularizers.base import RegularizerInput
from fedssl.seeding import torch_generator
from fedssl.views import Views
from tests.fedssl.regularizers.made import fit, make


def test_alignment_by_hand():
    # Two images that the local encoder puts where the received one puts their other views, at 90 degrees: either
    # term is log(1 + e^0 / e^1).
    e = torch.eye(2)
    value = alignment(e, 2 * e, 3 * e, 4 * e, temperature=1.0)
    assert value.item() == pytest.approx(2 * math.log(1 + math.exp(-1)))
    # cos(z1, g2) = 0, cos(z2, g1) = 1 / sqrt(2)
    z1, z2, g1, g2 = (torch.tensor([vector]) for vector in ([1.0, 0.0], [1.0, 1.0], [2.0, 0.0], [0.0, 3.0]))
    assert alignment(z1, z2, g1, g2, distance="cosine").item() == pytest.approx(-math.sqrt(0.5) / 2)


def step_of(method: SSLMethod, view1: Tensor, view2: Tensor) -> RegularizerInput:
    z = (method.encoder(view1), method.encoder(view2))
    return RegularizerInput(method, Views.of(view1, view2), z, torch_generator(0, "train"))


def test_alignment_compares_with_the_other_view_under_the_received_encoder():
    method = make("simclr").eval()
    view1, view2 = torch.rand(2, 6, 1, 8, 8, generator=torch_generator(0, "views"))
    term = Alignment(weight=0.5)
    term.on_train_start(method)
    g1, g2 = method.encoder(view1).detach(), method.encoder(view2).detach()
    with torch.no_grad():
        for weights in method.encoder.parameters():
            weights.mul_(1.1).add_(0.05)
    step = step_of(method, view1, view2)
    expected = 2 + 0.5 * (info_nce(step.z[0], g2, temperature=0.2) + info_nce(step.z[1], g1, temperature=0.2))
    assert term.apply(torch.tensor(2.0), step).item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_received_encoder_is_fixed_until_the_next_start():
    method, term = make("simclr"), Alignment(weight=1.0)
    term.on_train_start(method)
    copies = {name: tensor.clone() for name, tensor in term.received.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in term.received.state_dict().items()}
    fit(method, term)  # starts it with the same weights
    assert not term.received.training
    for name, tensor in term.received.state_dict().items():
        assert torch.equal(tensor, copies[name])
        assert tensor.data_ptr() == places[name] != method.encoder.state_dict()[name].data_ptr()
    assert not torch.equal(method.encoder.state_dict()["blocks.0.0.weight"], copies["blocks.0.0.weight"])
    term.on_train_start(method)
    for name, tensor in term.received.state_dict().items():
        assert torch.equal(tensor, method.encoder.state_dict()[name])
        assert tensor.data_ptr() == places[name]


@pytest.mark.parametrize("distance", ["info_nce", "cosine"])
def test_the_gradient_of_the_alignment_reaches_the_local_encoder_only(distance):
    method, term = make("simclr"), Alignment(weight=1.0, distance=distance)
    term.on_train_start(method)
    view1, view2 = torch.rand(2, 6, 1, 8, 8, generator=torch_generator(0, "views"))
    term.apply(torch.zeros(()), step_of(method, view1, view2)).backward()
    assert all(weights.grad is not None and weights.grad.abs().sum() > 0 for weights in method.encoder.parameters())
    assert all(weights.grad is None for weights in method.projector.parameters())
    assert all(weights.grad is None and not weights.requires_grad for weights in term.received.parameters())
