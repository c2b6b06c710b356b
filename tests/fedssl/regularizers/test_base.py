"""All regularizers: degenerate batches, training with every method, and refused settings."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.regularizers.base import CombinedRegularizer, Regularizer
from fedssl.regularizers.decorr import Decorrelation, feature_decorrelation
from fedssl.regularizers.fur import FUR, tangent_swd, uot_uniformity
from tests.cases import some
from tests.fedssl.regularizers.made import fit, make
from tests.methods import REGULARIZERS as NAMES
from tests.methods import TYPICAL, WHOLE


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


def test_the_terms_of_sums_of_sums_are_listed() -> None:
    terms = [Regularizer(), FUR(), Regularizer()]
    assert CombinedRegularizer(terms[0], CombinedRegularizer(*terms[1:])).terms == terms


def choice(*overrides: str) -> Regularizer:
    return compose([f"regularizer={overrides[0]}", *overrides[1:]]).training.regularizer.instantiate()


VARIANTS: dict[str, Callable[[], Regularizer]] = {
    **{name: partial(choice, name) for name in NAMES if name != "prox"},  # whose term is 0 in the first step
    "fur, tangent_swd": lambda: FUR(weight=0.01, variant="tangent_swd"),
    "decorr, encoder": lambda: Decorrelation(part="encoder"),
}


# With a target, with centroids, with classes in place of a projector; the others give a regularizer what byol does.
METHODS = [name for name in WHOLE if name in (*TYPICAL, "supervised")]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", some(METHODS, default=["supervised"]))
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
