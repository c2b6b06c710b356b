"""LeJEPA: the prediction by its equation and as in lightly, views of several sizes, and common directions."""

import pytest
import torch

from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.losses import sigreg
from fedssl.methods import lejepa
from fedssl.methods.base import build_method
from fedssl.methods.lejepa import LeJEPA, prediction
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer
from tests.failures import failures_after
from tests.federation import Federation
from tests.fedssl.methods.made import HEAD, draw, encoder, multi_crop


def make(*, lambd: float = 0.05, num_slices: int = 16, num_points: int = 17, t_max: float = 5.0) -> LeJEPA:
    return LeJEPA(encoder(), projector=HEAD, lambd=lambd, num_slices=num_slices, num_points=num_points, t_max=t_max)


@pytest.mark.parametrize("num_global", [2, 3])
def test_prediction_is_its_equation(num_global):
    z = draw(5, 4, 3)
    expected = 0.0
    for i in range(4):
        center = [sum(float(z[v, i, a]) for v in range(num_global)) / num_global for a in range(3)]
        for v in range(5):
            expected += sum((float(z[v, i, a]) - center[a]) ** 2 for a in range(3)) / (5 * 4 * 3)
    assert prediction(z, num_global=num_global).item() == pytest.approx(expected)


def test_prediction_by_hand():
    """The global views 0 and 2 have the mean 1. Squared distances of 0, 2 and the local 4 are 1, 1 and 9."""
    z = torch.tensor([0.0, 2.0, 4.0]).view(3, 1, 1)
    assert prediction(z, num_global=2).item() == pytest.approx(11 / 3)


def test_the_gradient_flows_through_the_mean_of_the_global_views():
    """Of ((a - m)^2 + (b - m)^2 + (c - m)^2) / 3 with m = (a + b) / 2, the derivative by a is
    (2 (a - m) - (a - m) - (b - m) - (c - m)) / 3 = (a - b - c + m) / 3: -5 / 3 for a, b, c = 0, 2, 4 and m = 1."""
    z = torch.tensor([0.0, 2.0, 4.0]).view(3, 1, 1).requires_grad_()
    prediction(z, num_global=2).backward()
    assert z.grad[0].item() == pytest.approx(-5 / 3)


@pytest.mark.parametrize("num_local", [0, 3])
def test_loss_is_that_of_one_pass_per_size(num_local):
    method, views = make(lambd=0.3), multi_crop(num_local=num_local)
    z = method.projector(method.encoder(torch.cat(views.images[:2]))).chunk(2)
    if num_local:
        z += method.projector(method.encoder(torch.cat(views.images[2:]))).chunk(num_local)
    z = torch.stack(z)
    statistic = sigreg(z, slices=16, generator=torch_generator(0, "directions", 1), num_points=17, t_max=5.0)
    expected = 0.7 * prediction(z, num_global=2) + 0.3 * statistic
    torch.testing.assert_close(method.loss(views), expected, rtol=1e-6, atol=0)


@pytest.fixture
def drawn(monkeypatch):
    """Record the first number that each call of SIGReg would draw."""
    numbers = []

    def record(z, *, generator, **settings):
        numbers.append(torch.randn(1, generator=torch.Generator().set_state(generator.get_state())).item())
        return sigreg(z, generator=generator, **settings)

    monkeypatch.setattr(lejepa, "sigreg", record)
    return numbers


def test_clients_share_the_directions_of_a_step(drawn, tmp_path):
    """The clients have different images, and numbers of images: 8 and 3 batches of 8."""
    overrides = ["method=lejepa", "num_clients=2", "partition=dirichlet", "partition.alpha=0.1", "batch_size=8"]
    federation = Federation(tmp_path, *overrides, "strategy=fedavg", "dataset.limit=80")
    rounds = []
    for _ in range(2):
        drawn.clear()
        federation.run(1)
        counts = [-(-update["metrics"]["num-examples"] // 8) for update in federation.updates[-2:]]
        assert counts[0] != counts[1]
        first, second = drawn[: counts[0]], drawn[counts[0] :]
        assert len(second) == counts[1]
        steps = min(counts)
        assert first[:steps] == second[:steps]
        assert len(set(drawn)) == max(counts)  # each step of a client has others
        rounds.append(drawn[0])
    assert rounds[0] != rounds[1]


def test_cuda_graphs_are_rejected_with_their_reason(monkeypatch):
    monkeypatch.setattr("fedssl.training.is_gpu", lambda device: False)
    settings = compose(["method=lejepa", "encoder.width=4", "cuda_graphs=true", "optimizer.fused=true"])
    with pytest.raises(InputError, match="the steps of LeJEPA differ"):
        LocalTrainer.build(settings.training, build_method(settings.model))


def test_training_without_sigreg_is_reported_as_a_failure(tmp_path):
    (failure,) = failures_after(tmp_path, 4, "method=lejepa", "method.lambd=0")
    assert "nearly the same projection; raise method.lambd" in failure


@torch.no_grad()
def test_projections_too_far_from_each_other_are_a_failure():
    """The characteristic function of distant projections is 1 at t = 0 and near 0 elsewhere. The integral of
    exp(-3 t^2 / 2) is sqrt(2 pi / 3) = 1.447, of which the trapezoid rule has 5 / 16 at t = 0."""
    method, views = make(num_slices=64).eval(), multi_crop(200)
    last = method.projector[-1]
    last.weight.copy_(1e3 * last.weight / torch.cat(method.project(lejepa.by_size(views.images))).std(dim=0)[:, None])
    found = method.diagnose(views)
    assert found["sigreg_per_image"] == pytest.approx((2 * torch.pi / 3) ** 0.5 - 5 / 16, rel=0.03)
    assert [mode.diagnostic for mode in method.failure_modes if mode.applies(found)] == ["sigreg_per_image"]
