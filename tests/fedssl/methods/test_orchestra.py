"""Orchestra: clusters by hand and slowly, the loss, the memory, what the server makes of centroids, whole runs."""

import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.worker import worker_for
from fedssl.config.load import parse_client_config
from fedssl.methods.heads import MLP
from fedssl.methods.orchestra import (
    Orchestra,
    consistency,
    equal_clusters,
    farthest_points,
    global_centroids,
    rotate_quarters,
)
from fedssl.model_arrays import exchanged_names, local_names, read_layers
from fedssl.training import capture_outputs
from fedssl.views import Views
from strategies.types import GLOBAL
from tests.federation import Federation
from tests.fedssl.methods.made import draw, encoder, step, views

HEAD = partial(MLP, hidden_dim=16, out_dim=8, last_batch_norm=True)


def make_method(*, local_clusters=3, global_clusters=5, queue_size=8, temperature=0.1) -> Orchestra:
    sizes = {"local_clusters": local_clusters, "global_clusters": global_clusters, "queue_size": queue_size}
    return Orchestra(encoder(), projector=HEAD, temperature=temperature, ema_decay=0.9, **sizes)


def with_centroids(method: Orchestra) -> Orchestra:
    method.centroids.copy_(F.normalize(draw(*method.centroids.shape, seed=3), dim=1))
    return method


def groups(*sizes: int, spread: float = 0.05) -> Tensor:
    """Vectors near the first axes of eight dimensions, as many at each as told, of lengths that differ."""
    axes = torch.eye(8, dtype=torch.float64).repeat_interleave(torch.tensor([*sizes, *[0] * (8 - len(sizes))]), dim=0)
    near = axes + spread * draw(*axes.shape, seed=4)
    return near * (1 + torch.arange(len(near)).remainder(3))[:, None]


def by_axis(centroids: Tensor) -> Tensor:
    return centroids[centroids.argmax(dim=1).argsort()]


def test_far_apart_by_hand():
    """The mean of the four is (0, 0.4): least like it is (0, -1), least like that (0, 1), and then (1, 0) is as like to
    either as (-0.6, 0.8) is to (0, 1): 0 < 0.8."""
    points = torch.tensor([[0.6, 0.8], [0.0, 1.0], [0.0, -1.0], [-0.6, 0.8]])
    points = torch.cat((points, torch.tensor([[1.0, 0.0]])))
    assert farthest_points(points, count=3).tolist() == [[0.0, -1.0], [0.0, 1.0], [1.0, 0.0]]


def test_consistency_is_its_equation():
    z, target, centroids = draw(4, 3, seed=1), draw(4, 3, seed=2), F.normalize(draw(6, 3, seed=3), dim=1)

    def shares(x: Tensor) -> list[float]:
        cosines = [float(x @ c) / math.sqrt(float(x @ x)) for c in centroids]
        powers = [math.exp(value / 0.3) for value in cosines]
        return [power / sum(powers) for power in powers]

    expected = 0.0
    for own, other in zip(z, target, strict=True):
        expected -= sum(p * math.log(q) for p, q in zip(shares(other), shares(own), strict=True)) / 4
    assert float(consistency(z, target, centroids, temperature=0.3)) == pytest.approx(expected)


def test_consistency_teaches_the_online_network_only():
    z, target, centroids = (x.requires_grad_() for x in (draw(4, 3, seed=1), draw(4, 3, seed=2), torch.eye(3).double()))
    consistency(z, target, centroids.detach(), temperature=0.3).backward()
    assert z.grad.abs().max() > 1e-3
    assert target.grad is None


def test_turned_images_by_hand():
    """Counter-clockwise: a quarter moves the right column to the top."""
    image = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    turned = rotate_quarters(image.expand(6, 1, 2, 2))
    by_hand = {0: [[1, 2], [3, 4]], 1: [[2, 4], [1, 3]], 2: [[4, 3], [2, 1]], 3: [[3, 1], [4, 2]]}
    assert turned[:, 0].tolist() == [by_hand[quarter] for quarter in (0, 1, 2, 3, 0, 1)]


def test_loss_is_consistency_plus_turns():
    method = with_centroids(make_method())
    step(method, lr=0.05)  # so that target and online differ
    view1, view2 = views()
    turned, quarters = rotate_quarters(view1), torch.arange(len(view1)) % 4
    logits = method.rotation(method.projector(method.encoder(turned)))
    z2 = method.projector(method.encoder(view2))
    target1 = method.target_projector(method.target_encoder(view1))
    expected = consistency(z2, target1, method.centroids, temperature=0.1) + F.cross_entropy(logits, quarters)
    torch.testing.assert_close(method.loss(method.inputs(Views.of(view1, view2))), expected, rtol=0, atol=0)
    assert method.loss(method.inputs(Views.of(view1, view2))).shape == ()


def test_regularizers_get_outputs_of_the_first_two_views():
    method = make_method()
    given = method.inputs(Views.of(*views()))
    with capture_outputs(method, "encoder") as outputs:
        method.loss(given)
    assert all(torch.equal(h, method.encoder(view)) for h, view in zip(outputs, given.images[:2], strict=True))


def test_parts_and_who_has_them():
    method = make_method()
    parts = {name.partition(".")[0] for name in exchanged_names(method)}
    assert parts == {"encoder", "projector", "rotation"}
    assert (method.uploaded_parts, method.broadcast_parts) == (("local_centroids",), ("centroids",))
    assert {name.partition(".")[0] for name in local_names(method)} == {"target_encoder", "target_projector", "memory"}
    method.loss(method.inputs(Views.of(*views()))).backward()
    for name, parameter in method.named_parameters():
        assert (parameter.grad is None) == name.startswith("target_"), name


def test_the_memory_has_the_targets_first_view():
    method = with_centroids(make_method(queue_size=16))
    step(method, lr=0.05)
    view1, view2 = views()
    method.loss(method.inputs(Views.of(view1, view2)))
    expected = F.normalize(method.target_projector(method.target_encoder(view1)), dim=1)
    torch.testing.assert_close(method.memory[:6], expected)
    assert method.memory[6:12].any(dim=1).all()
    assert not method.memory[12:].any()


def uploaded_centroids(method: Orchestra) -> torch.Tensor:
    """Return the uploaded parts of a method after local training; the method is not changed."""
    uploaded = method.parts_to_upload(read_layers(method, method.named_tensors))
    assert uploaded.keys() == {"local_centroids"}
    assert not method.local_centroids.any()
    return torch.from_numpy(uploaded["local_centroids"])


def test_local_centroids_are_those_of_the_memory():
    method = make_method(queue_size=20)
    method.enqueue(groups(5, 5, 5))
    centroids = uploaded_centroids(method)
    torch.testing.assert_close(centroids, equal_clusters(method.memory[:15], clusters=3).float())
    torch.testing.assert_close(by_axis(centroids), torch.eye(8)[:3], rtol=0, atol=0.1)


def local(*axes: int) -> np.ndarray:
    """Local centroids near these axes of eight dimensions."""
    return np.eye(8, dtype=np.float32)[list(axes)] + 0.05 * draw(len(axes), 8, seed=sum(axes)).numpy().astype("f4")


def clusters_of(clients: Iterable[np.ndarray], old: np.ndarray) -> np.ndarray:
    return global_centroids(torch.from_numpy(np.concatenate(list(clients))), old=torch.from_numpy(old)).numpy()


def test_global_clusters_are_found_though_no_client_has_all():
    clients = [local(0, 1, 2), local(1, 2, 3), local(2, 3, 0), local(3, 0, 1)]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        result = clusters_of((clients[client] for client in order), np.zeros((4, 8), np.float32))
        assert result.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(result, axis=1), 1, rtol=1e-6)
        np.testing.assert_allclose(result[result.argmax(axis=1).argsort()], np.eye(8)[:4], atol=0.1)


def test_the_servers_half_clusters_what_clients_send():
    method = make_method(global_clusters=4)
    received = [local(client, 1, 2) for client in range(3)]
    old = np.zeros((4, 8), np.float32)
    made = method.aggregate_parts([{"local_centroids": array} for array in received], {"centroids": old})
    assert list(made) == ["centroids"]
    assert made["centroids"].dtype == np.float32
    np.testing.assert_array_equal(made["centroids"], clusters_of(received, old))


def test_a_client_trains_with_the_downloaded_centroids(tmp_path):
    federation = Federation(tmp_path, "method=orchestra", "strategy=fedavg", "num_clients=2")
    federation.run(1)
    sent = federation.state.models[GLOBAL].broadcast["centroids"]
    assert sent.any()
    federation.run(1)
    worker = worker_for(parse_client_config(federation.settings.client_yaml))
    assert np.array_equal(worker.method.centroids.numpy(), sent)
    communication = federation.strategy.describe_communication(federation.method)
    assert communication.download == "encoder, projector, rotation, centroids (made by the server side)"
    assert communication.upload == "encoder, projector, rotation, local_centroids (for the server side)"
    assert communication.local_state == "target_encoder, target_projector, memory"
