"""BYOL: its loss, its target and what a client keeps."""

import pytest
import torch
from torch import Tensor

from fedssl.losses import byol
from fedssl.methods.byol import BYOL
from fedssl.views import Views
from tests.fedssl.methods.made import HEAD, encoder, step, views


def make_byol(*, ema_decay: float = 0.9, target_init: str = "persist") -> BYOL:
    return BYOL(encoder(), projector=HEAD, predictor=HEAD, ema_decay=ema_decay, target_init=target_init)


def pairs(method: BYOL) -> list[tuple[Tensor, Tensor]]:
    """Target and online parameters that belong together."""
    targets = [*method.target_encoder.parameters(), *method.target_projector.parameters()]
    return list(zip(targets, [*method.encoder.parameters(), *method.projector.parameters()], strict=True))


def test_byol_loss_is_the_symmetric_loss_of_all_four_networks() -> None:
    method = make_byol()
    step(method)  # so that target and online differ
    view1, view2 = views()
    p1 = method.predictor(method.projector(method.encoder(view1)))
    p2 = method.predictor(method.projector(method.encoder(view2)))
    z1 = method.target_projector(method.target_encoder(view1))
    z2 = method.target_projector(method.target_encoder(view2))
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), byol(p1, z2, p2, z1), rtol=0, atol=0)


def test_byol_target_is_a_copy_without_gradient() -> None:
    method = make_byol()
    for target, online in pairs(method):
        assert torch.equal(target, online)
        assert target.data_ptr() != online.data_ptr()
        assert not target.requires_grad
        assert online.requires_grad
    method.loss(Views.of(*views())).backward()
    assert all(target.grad is None and online.grad is not None for target, online in pairs(method))
    assert all(p.grad is not None for p in method.predictor.parameters())


def test_byol_moving_average_by_hand() -> None:
    """Target 2 everywhere, online 6: 0.75 * 2 + 0.25 * 6 = 3, then 0.75 * 3 + 0.25 * 6 = 3.75; all exact in float32."""
    method = make_byol(ema_decay=0.75)
    with torch.no_grad():
        for target, online in pairs(method):
            target.fill_(2)
            online.fill_(6)
    method.on_step_end()
    assert all((target == 3).all() and (online == 6).all() for target, online in pairs(method))
    method.on_step_end()
    assert all((target == 3.75).all() for target, _ in pairs(method))


def test_byol_moving_average_leaves_statistics_to_the_targets_own_passes() -> None:
    """Each network sees both views once; the average itself moves no buffer."""
    method = make_byol(ema_decay=0.0)
    method.loss(Views.of(*views()))
    buffers = {name: buffer.clone() for name, buffer in method.target_encoder.named_buffers()}
    assert all(int(value) == 2 for name, value in buffers.items() if name.endswith("num_batches_tracked"))
    with torch.no_grad():
        for name, buffer in method.encoder.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(100)
    method.on_step_end()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in method.target_encoder.named_buffers())


@pytest.mark.parametrize(
    ("target", "first", "copied"),
    [("persist", True, True), ("persist", False, False), ("reset", True, True), ("reset", False, True)],
)
def test_byol_start_of_a_round(target: str, first: bool, copied: bool) -> None:
    """A first target is a copy of what was just received, later ones are the client's own unless told otherwise."""
    method = make_byol(target_init=target)
    step(method)
    online = {name: value.clone() for name, value in method.encoder.state_dict().items()}
    before = [value.clone() for value, _ in pairs(method)]
    method.start_round(first=first)
    if copied:
        assert all(torch.equal(value, online[name]) for name, value in method.target_encoder.state_dict().items())
        assert all(torch.equal(own, theirs) and own.data_ptr() != theirs.data_ptr() for own, theirs in pairs(method))
    else:
        assert all(torch.equal(own, old) for (own, _), old in zip(pairs(method), before, strict=True))
    assert not any(own.requires_grad for own, _ in pairs(method))
