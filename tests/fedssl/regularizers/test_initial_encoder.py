"""L2-SP and feature distillation: by hand, slowly, and against the initial encoder of a federation."""

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.methods.base import INITIAL_ENCODER, SSLMethod, build_method
from fedssl.regularizers.base import RegularizerInput
from fedssl.regularizers.initial_encoder import L2SP, FeatureDistillation
from fedssl.seeding import torch_generator
from fedssl.views import Views
from strategies.types import GLOBAL
from tests.encoders import LinearEncoder
from tests.federation import Federation
from tests.methods import overrides_of


class Linear(SSLMethod):
    """A linear encoder without bias and a linear projector."""

    def __init__(self, encoder: list[list[float]], projector: list[list[float]]) -> None:
        super().__init__()
        self.encoder = LinearEncoder(encoder)
        self.projector = nn.Linear(len(projector[0]), len(projector), bias=False)
        self.projector.weight = nn.Parameter(torch.tensor(projector))


def add(regularizer, method, views=None, z=()):
    step = RegularizerInput(method, views or Views.of(torch.zeros(1, 2)), z, torch_generator(0, "train"))
    regularizer.on_train_start(method)
    return regularizer.apply(torch.tensor(10.0), step)


def moved() -> Linear:
    """Encoder weights (1, 1), (0, 2) that training has moved to (3, 1), (0, 1), and projector weights (2, -1)."""
    method = Linear([[1.0, 1.0], [0.0, 2.0]], [[2.0, -1.0]])
    method.keep_initial_encoder()
    with torch.no_grad():
        method.encoder.weight.copy_(torch.tensor([[3.0, 1.0], [0.0, 1.0]]))
    return method


def test_l2_sp_by_hand():
    """Differences (2, 0), (0, -1) have the squared norm 5, the projector has 5: 10 + 0.4 / 2 * 5 + 0.2 / 2 * 5 = 11.5.

    Gradients: 0.4 times the differences, and 0.2 times the projector's weights.
    """
    method = moved()
    loss = add(L2SP(alpha=0.4, beta=0.2), method)
    assert loss.item() == pytest.approx(11.5)
    loss.backward()
    torch.testing.assert_close(method.encoder.weight.grad, torch.tensor([[0.8, 0.0], [0.0, -0.4]]))
    torch.testing.assert_close(method.projector.weight.grad, torch.tensor([[0.4, -0.2]]))
    assert method.initial_encoder.weight.grad is None


@pytest.mark.parametrize("method", ["simclr", "byol", "supervised"])
def test_l2_sp_slowly(method):
    settings = compose([f"method={method}", "encoder.width=4"])
    model = build_method(settings.model)
    regularizer = L2SP(alpha=0.3, beta=0.7)
    model.keep_initial_encoder()
    expected = 0.0
    for index, (name, weights) in enumerate(model.named_parameters()):
        if not weights.requires_grad:
            continue
        change = torch.randn(weights.shape, generator=torch_generator(0, index))
        before = weights.detach().double()
        with torch.no_grad():
            weights.add_(change)
        if name.startswith("encoder."):
            expected += 0.3 / 2 * float(((weights.detach().double() - before) ** 2).sum())
        else:
            expected += 0.7 / 2 * float((weights.detach().double() ** 2).sum())
    assert add(regularizer, model).item() - 10 == pytest.approx(expected, rel=1e-4)


def test_feature_distillation_by_hand():
    """View 1 is (1, 0): h = (3, 0) and h_0 = (1, 0) have the same direction. View 2 is (0, 1): h = (1, 1) and
    h_0 = (1, 2) have the squared distance 2 - 2 * 3 / sqrt 10. The mean times 2 is 2 - 6 / sqrt 10."""
    method = moved()
    views = Views.of(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    z = tuple(method.encoder(view) for view in views.images)
    loss = add(FeatureDistillation(weight=2.0), method, views, z)
    assert loss.item() == pytest.approx(10 + 2 - 6 / 10**0.5, rel=1e-6)
    loss.backward()
    assert method.encoder.weight.grad.any()
    assert method.initial_encoder.weight.grad is None


def test_feature_distillation_slowly():
    model = build_method(compose(["encoder.width=4"]).model)
    model.keep_initial_encoder()
    model.train()
    with torch.no_grad():
        for weights in model.encoder.parameters():
            weights.mul_(1.1).add_(0.01)
    views = Views.of(*(torch.randn(5, 1, 8, 8, generator=torch_generator(0, number)) for number in range(2)))
    z = tuple(model.encoder(view) for view in views.images)
    distances = []
    for h, images in zip(z, views.images, strict=True):
        initial = model.initial_encoder(images)  # in eval mode, unlike the encoder
        for one, other in zip(h.detach().double(), initial.double(), strict=True):
            distances.append(float(((one / one.norm() - other / other.norm()) ** 2).sum()))
    expected = 10 + 0.5 * sum(distances) / len(distances)
    assert add(FeatureDistillation(weight=0.5), model, views, z).item() == pytest.approx(expected, rel=1e-5)
    assert not model.initial_encoder.training


@pytest.mark.parametrize("name", ["l2_sp", "feature_distillation"])
def test_clients_download_the_initial_encoder_once_and_keep_it(tmp_path, name):
    """Two of three clients a round: a client that joins late receives that of before the first round, too."""
    federation = Federation(tmp_path, f"regularizer={name}", "strategy=fedavg", "clients_per_round=2")
    initial = {layer: array.copy() for layer, array in federation.layers.items() if layer.startswith("encoder.")}
    sent = {f"initial_{layer}" for layer in initial}
    seen: set[int] = set()
    for _ in range(4):
        federation.run(1)
        assert federation.report.dropped == {}
        for row, plan in zip(federation.report.clients, federation.plans[-2:], strict=True):
            assert set(plan["method-broadcast"]) == (set() if row.client in seen else sent)
            seen.add(row.client)
            for layer, array in plan["method-broadcast"].items():
                np.testing.assert_array_equal(array.numpy(), initial[layer.removeprefix("initial_")])
    assert len(seen) == 3
    assert not any(INITIAL_ENCODER in layer for update in federation.updates for layer in update["arrays"])
    broadcast = federation.state.models[GLOBAL].broadcast
    assert all(np.array_equal(broadcast[f"initial_{layer}"], array) for layer, array in initial.items())
    summary = federation.strategy.describe_communication(federation.method)
    assert summary.download == "encoder, projector, initial_encoder (of the server side, once)"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["regularizer=feature_distillation", "schedule=layer_wise", "rounds=5"],
            "FeatureDistillation compares representations of images, but the schedule freezes trained stages",
        ),
        (["regularizer=l2_sp", "regularizer.alpha=-1"], "regularizer.alpha=-1 must be a number of at least 0"),
        (["regularizer=feature_distillation", *overrides_of("mae")], "FeatureDistillation needs the encoder's output"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        Federation(tmp_path, *overrides)
