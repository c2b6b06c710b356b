"""FedX: the relational loss, the four terms, and the copy of the received model that neither travels nor stays."""

import copy
import math

import pytest
import torch
from torch import Tensor

from client_app.worker import ClientWorker
from fedssl.config.load import parse_client_config
from fedssl.losses import nt_xent, relational
from fedssl.methods.fedx import FedX
from fedssl.model_arrays import local_names
from fedssl.views import Views
from fedssl.wire.messages import TrainPlan
from tests.federation import Federation
from tests.fedssl.losses.vectors import E1, E2, draw, slow_softmax
from tests.fedssl.methods.made import HEAD, encoder, step, views


def relation(z: Tensor, anchors: Tensor, i: int, temperature: float) -> list[float]:
    """How similar image i is to each other one: a softmax of cosines."""
    others = [j for j in range(len(anchors)) if j != i]
    cosines = [float(z[i] @ anchors[j] / (z[i].norm() * anchors[j].norm())) for j in others]
    return slow_softmax([cosine / temperature for cosine in cosines])


def slow_relational(z1: Tensor, z2: Tensor, anchors: Tensor, temperature: float) -> float:
    loss = 0.0
    for i in range(len(z1)):
        p, q = (relation(z, anchors, i, temperature) for z in (z1, z2))
        for one in (p, q):
            loss += sum(a * math.log(a / ((b + c) / 2)) for a, b, c in zip(one, p, q, strict=True)) / 2
    return loss / len(z1)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("batch", [3, 6])
def test_relational_is_its_equation(batch: int, temperature: float) -> None:
    z1, z2, anchors = draw(batch, 5, count=3)
    result = relational(z1, z2, anchors, temperature=temperature).item()
    assert result == pytest.approx(slow_relational(z1, z2, anchors, temperature), rel=1e-9)


def test_relational_by_hand() -> None:
    # Anchors e1, e1, e2. Only image 0 has views that differ, e1 and e2. Its relations with the others (e1, e2), at
    # temperature t = 1 / log 3, are softmax(log 3, 0) = (3/4, 1/4) and (1/4, 3/4), with the mean (1/2, 1/2). Their
    # divergence is 3/4 log(3/2) + 1/4 log(1/2), both KLs being equal; the mean over three images has a third of it.
    anchors = torch.stack((E1, E1, E2))
    z1, z2 = torch.stack((E1, E1, E2)), torch.stack((E2, E1, E2))
    expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 3
    assert relational(z1, z2, anchors, temperature=1 / math.log(3)).item() == pytest.approx(expected, rel=1e-5)


def make(temperature: float = 0.1) -> FedX:
    return FedX(encoder(), projector=HEAD, predictor=HEAD, temperature=temperature)


def received(method: FedX) -> dict[str, Tensor]:
    encoder, projector = method.received
    return {f"encoder.{name}": value for name, value in encoder.state_dict().items()} | {
        f"projector.{name}": value for name, value in projector.state_dict().items()
    }


def test_the_loss_has_two_local_and_two_global_terms() -> None:
    method = make()
    start = copy.deepcopy(method)
    step(method, lr=0.1)  # so that the received and the trained model differ
    start.eval()
    view1, view2 = views()
    with torch.no_grad():
        g2 = start.projector(start.encoder(view2))
    trained = copy.deepcopy(method)
    z1, z2 = (trained.projector(trained.encoder(view)) for view in (view1, view2))
    p1, p2 = trained.predictor(z1), trained.predictor(z2)
    contrast = nt_xent(z1, z2, temperature=0.1) + nt_xent(p1, g2, temperature=0.1)
    expected = contrast + slow_relational(z1, z2, z1, 0.1) + slow_relational(p1, p2, g2, 0.1)
    assert method.loss(Views.of(view1, view2)).item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_received_model_is_frozen_within_a_round() -> None:
    method = make().train()
    before = {name: value.clone() for name, value in received(method).items()}
    memory = {name: value.data_ptr() for name, value in received(method).items()}
    step(method, lr=0.1)
    # Neither the optimizer nor the running statistics of its own passes change it, and no gradient reaches it.
    assert all(torch.equal(value, before[name]) for name, value in received(method).items())
    assert not any(network.training for network in method.received)
    assert all(p.grad is None and not p.requires_grad for network in method.received for p in network.parameters())
    assert all(p.grad is not None for p in method.parameters())
    own = method.state_dict()
    assert any(not torch.equal(value, own[name]) for name, value in before.items())
    method.start_round(first=False)
    assert all(torch.equal(value, own[name]) for name, value in received(method).items())
    assert {name: value.data_ptr() for name, value in received(method).items()} == memory
    assert all(own[name].data_ptr() != address for name, address in memory.items())


def test_the_received_model_is_no_part_but_moves_along() -> None:
    method = make()
    assert {name.partition(".")[0] for name in method.state_dict()} == {"encoder", "projector", "predictor"}
    assert local_names(method) == []
    method.double()
    assert all(value.dtype in (torch.float64, torch.int64) for value in received(method).values())
    memory = {tensor.data_ptr() for tensor in method.all_tensors()}
    assert {tensor.data_ptr() for tensor in [*received(method).values(), *method.state_dict().values()]} == memory
    view1, view2 = views()
    assert method.loss(Views.of(view1.double(), view2.double())).dtype == torch.float64


def test_clients_of_a_process_keep_received_models_apart(tmp_path) -> None:
    federation = Federation(tmp_path, "method=fedx", "strategy=fedavg", "num_clients=2")
    plan = TrainPlan(
        round=1, layers=federation.layers, settings="", metrics=(), oldest_resumable_round=0, code_fingerprint=""
    )
    alone = ClientWorker(parse_client_config(federation.settings.client_yaml)).train(plan, 1, tmp_path / "alone")
    shared = ClientWorker(parse_client_config(federation.settings.client_yaml))
    shared.train(plan, 0, tmp_path / "first")
    second = shared.train(plan, 1, tmp_path / "second")
    assert all((second.layers[name] == array).all() for name, array in alone.layers.items())
