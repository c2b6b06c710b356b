"""SAM: a step by hand, equal to SGD without a radius, and buffers that change once."""

import pytest
import torch

from fedssl.optimizers.sam import SAM
from tests.federation import Federation


def test_a_step_by_hand():
    # L = (w1^2 + 2 w2^2) / 2 at (3, 2): gradient (3, 4) of norm 5. rho = 0.5 moves to (3.3, 2.4), whose gradient is
    # (3.3, 4.8). A step of 0.1 gives (3 - 0.33, 2 - 0.48).
    weights = [torch.tensor([3.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)]
    buffer, seen, optimizer = torch.zeros(1), [], SAM(weights, lr=0.1, rho=0.5)

    def backward():
        optimizer.zero_grad()
        loss = (weights[0] ** 2 + 2 * weights[1] ** 2).sum() / 2
        loss.backward()
        seen.append(buffer.item())
        buffer.add_(loss.detach())
        return loss.detach()

    loss = optimizer.compute_gradient(backward, [buffer])
    assert loss.item() == 8.5
    assert [weight.item() for weight in weights] == [3, 2]
    assert [weight.grad.item() for weight in weights] == pytest.approx([3.3, 4.8])
    assert buffer.item() == 8.5  # of the first pass
    assert seen == [0, 0]  # both passes are on the same queue
    optimizer.step()
    assert [weight.item() for weight in weights] == pytest.approx([2.67, 1.52])


def test_both_passes_draw_the_same_numbers():
    weight, generator, drawn = torch.ones(1, requires_grad=True), torch.Generator().manual_seed(0), []

    def backward():
        drawn.append(torch.rand((), generator=generator).item())
        weight.grad = weight.detach() * drawn[-1]
        return torch.ones(())

    SAM([weight], lr=0.1, rho=0.5).compute_gradient(backward, [], [generator])
    expected = torch.Generator().manual_seed(0)
    assert drawn == [torch.rand((), generator=expected).item()] * 2
    assert torch.equal(generator.get_state(), expected.get_state())  # as after one pass


def test_generators_of_training_and_method_are_those_of_all_passes(tmp_path, monkeypatch):
    found, original = [], SAM.compute_gradient

    def compute_gradient(optimizer, backward, buffers, generators):
        found.append(len({id(generator) for generator in generators}))
        return original(optimizer, backward, buffers, generators)

    monkeypatch.setattr(SAM, "compute_gradient", compute_gradient)
    views = ["method=lejepa", "method.projector.hidden_dim=8", "method.projector.out_dim=4"]
    Federation(tmp_path, "strategy=fedavg", "optimizer=sam", *views).run(1)
    assert {*found} == {2}


def test_without_a_radius_nothing_is_copied(monkeypatch):
    weight, buffer, loss = torch.ones(1, requires_grad=True), torch.zeros(1), torch.ones(())
    weight.grad = torch.ones(1)
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: pytest.fail("a copy"))
    assert SAM([weight], lr=0.1, rho=0).compute_gradient(lambda: loss, [buffer]) is loss


@pytest.mark.parametrize("method", ["simclr", "swav"])
def test_without_a_radius_it_is_sgd(tmp_path, method):
    """Also for a method with a queue, and then a radius changes weights and no counter."""
    head = ["method.projector.hidden_dim=16", "method.projector.out_dim=8"]
    overrides = ["strategy=fedavg", f"method={method}", *head]
    sgd, flat, sharp = (
        Federation(tmp_path / name, *overrides, *optimizer).run(1)
        for name, optimizer in (
            ("sgd", ["optimizer=sgd"]),
            ("flat", ["optimizer=sam", "optimizer.rho=0"]),
            ("sharp", ["optimizer=sam", "optimizer.rho=0.5"]),
        )
    )
    assert all((flat[name] == layer).all() for name, layer in sgd.items())
    counters = [name for name, layer in sgd.items() if layer.dtype.kind != "f"]
    assert counters
    assert all((sharp[name] == sgd[name]).all() for name in counters)
    assert any((sharp[name] != sgd[name]).any() for name in sgd)
