"""Local regularizers: their numbers by hand, against slow transcriptions, and inside training."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.losses import info_nce
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.alignment import Alignment, alignment
from fedssl.regularizers.base import Regularizer, RegularizerInput
from fedssl.regularizers.decorr import Decorrelation, feature_decorrelation
from fedssl.regularizers.fur import FUR, tangent_swd, uot_uniformity
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator
from fedssl.training import train
from fedssl.views import Views
from tests.cases import some
from tests.fedssl.regularizers.points import random, sphere
from tests.local_training import local_training
from tests.methods import REGULARIZERS as NAMES
from tests.methods import WHOLE

CONF = Path(__file__).parents[3] / "conf"
REGULARIZERS = {"fur": FUR, "decorr": Decorrelation, "alignment": Alignment}


# FUR


def test_the_terms_of_both_views_are_added_with_the_weight():
    # The samples are redrawn here the way the class draws them: for both views at once, from the step's generator.
    z1, z2 = random(5, 4).float(), random(5, 4, seed=1).float()
    step = RegularizerInput(SSLMethod(), Views.of(z1, z2), (z1, z2), torch_generator(0, "train"))
    s1, s2 = F.normalize(torch.randn(2, 5, 4, generator=torch_generator(0, "train")), dim=-1)
    alone = [uot_uniformity(z, samples=s, max_iter=20, tolerance=0).item() for z, s in ((z1, s1), (z2, s2))]
    together = uot_uniformity(torch.stack((z1, z2)), samples=torch.stack((s1, s2)), max_iter=20, tolerance=0)
    assert together.tolist() == pytest.approx(alone, rel=1e-6)
    both = FUR(weight=0.3, reduction="sum", max_iter=20, tolerance=0).apply(torch.tensor(2.0), step).item()  # Eq. 2
    assert both == pytest.approx(2 + 0.3 * sum(alone), rel=1e-6)
    both = Decorrelation(weight=0.3).apply(torch.tensor(2.0), step).item()
    assert both == pytest.approx(2 + 0.3 * (feature_decorrelation(z1) + feature_decorrelation(z2)).item(), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_degenerate_batches_have_finite_gradients(batch, dtype):
    same = torch.ones(batch, 4, dtype=dtype, requires_grad=True)
    s = F.normalize(torch.ones(batch, 4), dim=1)
    lines = torch.ones(batch, 4, 2)
    for value in (
        uot_uniformity(same, samples=s),
        uot_uniformity(same, samples=-s, cost_scale=0.1, tolerance=0),
        tangent_swd(same, samples=-s, bases=s, projections=lines),
        feature_decorrelation(same) + same.sum() * 0,  # one image: a constant
    ):
        (gradient,) = torch.autograd.grad(value, same)
        assert value.dtype == torch.float32
        assert value.isfinite()
        assert gradient.isfinite().all()


# The authors' code of FUR


def test_the_tangent_distance_equals_its_equation():
    z, s, bases = random(5, 3), sphere(5, 3), sphere(4, 3, seed=2)
    lines = random(4, 3, 2, seed=3)

    def log(b, x):
        x = x / x.norm()
        across = x - (b @ x) * b
        return torch.arccos(b @ x) * across / across.norm()

    slow = 0.0
    for b, p in zip(bases, lines, strict=True):
        ours, theirs = (torch.stack([log(b, row) for row in rows]) @ p for rows in (z, s))
        for k in range(2):
            pairs = zip(sorted(ours[:, k].tolist()), sorted(theirs[:, k].tolist()), strict=True)
            slow += sum((x - y) ** 2 for x, y in pairs) / 5 / 2 / 6
    fast = tangent_swd(z, samples=s, bases=bases, projections=lines)
    assert fast.item() == pytest.approx(slow, rel=1e-10)


class Alone(FUR):
    """FUR without the gradient of the method's own loss; it remembers the last step."""

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        self.step = step
        return super().apply(loss.detach(), step)


@pytest.mark.parametrize(("variant", "frozen"), [("uot", 0), ("tangent_swd", 1)])
@pytest.mark.parametrize("name", WHOLE)
def test_projections_of_both_views_are_spread_with_every_method(name, variant, frozen):
    method, term = make(name), Alone(variant=variant)
    depth = method.encoder.active_stages.depth
    with set_active_stages(method, depth=depth, frozen=frozen):
        fit(method, term)
    head, length = (
        ("encoder", method.encoder.feature_dim)
        if name == "supervised"
        else ("projector", method.projector.out_features)
    )
    assert term.resolve_part(method) == head
    assert term.step.z[0].shape == term.step.z[1].shape == (6, length)
    assert not torch.equal(term.step.z[0], term.step.z[1])
    touched = {part for part, weights in method.named_parameters() if weights.grad is not None and weights.grad.any()}
    assert {part.split(".")[0] for part in touched} == {"encoder", head}
    blocks = {part.split(".")[2] for part in touched if part.startswith("encoder.blocks.")}
    assert blocks == {str(block) for block in range(frozen, depth)}


# Decorrelation


def test_decorrelation_by_hand():
    # Three images, one dimension twice the other: the correlation is 1, so (3 - 1)^2 / 3. With a third dimension that
    # is constant one pair of three is correlated: a third of it. All four corners of a square: no correlation.
    z = torch.tensor([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]])
    assert feature_decorrelation(z).item() == pytest.approx(4 / 3)
    assert feature_decorrelation(-3 * z + 1).item() == pytest.approx(4 / 3)
    assert feature_decorrelation(torch.cat((z, torch.ones(3, 1)), dim=1)).item() == pytest.approx(4 / 9)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert feature_decorrelation(corners).item() == 0
    assert feature_decorrelation(z[:1]).item() == 0
    assert feature_decorrelation(z[:, :1]).item() == 0


def test_decorrelation_equals_its_equation():
    z = random(7, 5) @ random(5, 5, seed=1)
    correlation = np.corrcoef(z.numpy().T)
    squares = [correlation[i, j] ** 2 for i in range(5) for j in range(5) if i != j]
    assert feature_decorrelation(z).item() == pytest.approx(6**2 / 7 * np.mean(squares), rel=1e-6)
    z.requires_grad_()
    assert torch.autograd.gradcheck(feature_decorrelation, z)


# Alignment


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


# All of them, in training


def make(name: str) -> SSLMethod:
    settings = OmegaConf.create(
        {"method": OmegaConf.load(CONF / "method" / f"{name}.yaml"), "dataset": {"num_classes": 3}}
    )
    for head in {"projector", "predictor"} & set(settings.method):
        settings.method[head].hidden_dim = 16
    if "projector" in settings.method:
        settings.method.projector.out_dim = 8
    if name == "distillation":
        arguments = {"channels": 1, "size": 8, "width": 2}  # representations of length 8
        settings.method.teacher_encoder = {"encoder": "conv_small", "arguments": arguments, "mean": [0.5], "std": [0.5]}
    torch.manual_seed(0)
    return instantiate(settings.method, encoder=conv_small(channels=1, size=8, width=4))


def fit(method: SSLMethod, regularizer: Regularizer, *, precision: str = "fp32", epochs: int = 1) -> float:
    generator = torch_generator(0, "train")
    images = torch.randint(256, (12, 1, 8, 8), generator=generator, dtype=torch.uint8)
    if regularizer.uses_initial_encoder:
        method.keep_initial_encoder()
    return train(
        method,
        TensorImages(images),
        torch.arange(12),
        training=local_training(
            torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1),
            augment=lambda batch, draw: (batch / 255 + torch.rand(batch.shape, generator=draw), batch / 255),
            regularizer=regularizer,
            epochs=epochs,
            batch_size=6,
            precision=precision,
        ),
        generator=generator,
        labels=torch.arange(12) % 3,
    ).loss


def choice(*overrides: str) -> Regularizer:
    return compose([f"regularizer={overrides[0]}", *overrides[1:]]).training.regularizer.instantiate()


VARIANTS: dict[str, Callable[[], Regularizer]] = {
    **{name: partial(choice, name) for name in NAMES if name != "prox"},  # whose term is 0 in the first step
    "fur, tangent_swd": lambda: FUR(weight=0.01, variant="tangent_swd"),
    "decorr, encoder": lambda: Decorrelation(part="encoder"),
}


# With a target, with centroids, with classes in place of a projector; the others give a regularizer what byol does.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", some(WHOLE, default=["supervised"]))
def test_every_regularizer_trains_reproducibly_with_every_method(name, variant):
    if name == "supervised" and variant == "decorr":
        pytest.skip("supervised training has no projector")
    for precision in ("fp32", "bf16") if name == "byol" else ("fp32",):
        methods = [make(name) for _ in range(2)]
        losses = [fit(method, VARIANTS[variant](), precision=precision) for method in methods]
        assert math.isfinite(losses[0])
        assert losses[0] == losses[1]
        for one, other in zip(*(method.state_dict().values() for method in methods), strict=True):
            assert torch.equal(one, other)
            assert one.isfinite().all()
        assert losses[0] != fit(make(name), Regularizer(), precision=precision)


@pytest.mark.parametrize("variant", ["decorr", pytest.param("fur", marks=pytest.mark.heavy)])
def test_a_compiled_encoder_gives_regularizers_the_same_outputs(variant):
    """They take what the encoder puts out by a hook of their own for each step, and alignment copies the encoder."""
    compiled, plain = make("byol"), make("byol")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled.encoder.compile(backend=backend)
    regularizers = VARIANTS[variant](), VARIANTS[variant]()
    for _ in range(2):
        losses = [fit(*pair, epochs=2) for pair in zip((compiled, plain), regularizers, strict=True)]
        assert losses[0] == losses[1]
    assert len(graphs) == 1


@pytest.mark.parametrize("variant", ["uot", "tangent_swd"])
def test_the_mean_weighs_the_same_at_every_batch_size(variant):
    for batch in (16, 128, 200):
        z = random(2, batch, 16).float().requires_grad_()
        gradients = []
        for reduction in ("mean", "sum"):
            step = RegularizerInput(SSLMethod(), Views.of(*z), (z[0], z[1]), torch_generator(0, "train"))
            term = FUR(variant=variant, reduction=reduction).apply(torch.zeros(()), step)
            gradients += torch.autograd.grad(term, z)
        assert torch.allclose(gradients[0], gradients[1] * 128 / batch, rtol=1e-5)
        assert (gradients[0].norm() == gradients[1].norm()) == (batch == 128)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        *((f"{kind} weight=-0.1", "a number of at least 0") for kind in ("fur", "alignment", "decorr", "prox")),
        ("fur variant=kl", "uot or tangent_swd"),
        ("fur part=head", "projector or encoder"),
        ("fur reduction=none", "sum or mean"),
        ("fur cost_scale=0", "a number above 0"),
        ("fur tau_b=-1", "a number above 0"),
        ("fur max_iter=0", "an integer of at least 1"),
        ("fur tolerance=-1", "a number of at least 0"),
        ("fur gpu_iter=-1", "an integer of at least 0"),
        ("alignment distance=l2", "info_nce or cosine"),
        ("alignment temperature=0", "a number above 0"),
    ],
)
def test_settings_out_of_range_are_refused(setting: str, sentence: str) -> None:
    regularizer, override = setting.split()
    with pytest.raises(InputError, match=f"^regularizer.{override} must be {sentence}"):
        compose([f"regularizer={regularizer}", f"regularizer.{override}"])
