"""Heads and methods: what trains, what follows, what is kept, and the loss that comes out."""

from functools import partial
from math import exp, log
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from fedssl.config.load import compose
from fedssl.encoders import conv_small, vit_tiny
from fedssl.errors import InputError
from fedssl.losses import (
    barlow_twins,
    barlow_twins_unbiased,
    byol,
    info_nce,
    negative_cosine,
    nt_xent,
    nt_xent_one_sided,
)
from fedssl.methods.barlow_twins import BarlowTwins
from fedssl.methods.base import SSLMethod, build_method
from fedssl.methods.byol import BYOL
from fedssl.methods.heads import MLP
from fedssl.methods.moco_v3 import MoCoV3
from fedssl.methods.simclr import SimCLR
from fedssl.methods.simsiam import SimSiam
from fedssl.views import Views
from tests.methods import MASKED, WHOLE

CONF = Path(__file__).parents[3] / "conf"
HEAD = partial(MLP, hidden_dim=16, out_dim=8)


def encoder():
    torch.manual_seed(0)
    return conv_small(channels=1, size=8, width=4)


def views(batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, 1, 8, 8, generator=generator), torch.rand(batch, 1, 8, 8, generator=generator)


def make_byol(*, ema_decay: float = 0.9, target_init: str = "persist") -> BYOL:
    return BYOL(encoder(), projector=HEAD, predictor=HEAD, ema_decay=ema_decay, target_init=target_init)


def pairs(method: BYOL) -> list[tuple[Tensor, Tensor]]:
    """Target and online parameters that belong together."""
    targets = [*method.target_encoder.parameters(), *method.target_projector.parameters()]
    return list(zip(targets, [*method.encoder.parameters(), *method.projector.parameters()], strict=True))


def step(method: SSLMethod, *, lr: float = 0.5) -> None:
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=lr)
    method.loss(Views.of(*views())).backward()
    optimizer.step()
    method.on_step_end()


def kinds(head: MLP) -> list[type]:
    return [type(layer) for layer in head]


def test_mlp_layers() -> None:
    linear, norm, relu = nn.Linear, nn.BatchNorm1d, nn.ReLU
    assert kinds(MLP(5, hidden_dim=7, out_dim=3, num_layers=1)) == [linear]
    assert kinds(MLP(5, hidden_dim=7, out_dim=3)) == [linear, norm, relu, linear]
    plain = MLP(5, hidden_dim=7, out_dim=3, batch_norm=False)
    assert kinds(plain) == [linear, relu, linear]
    assert plain[0].bias is not None
    head = MLP(5, hidden_dim=7, out_dim=3, num_layers=3, last_batch_norm=True)
    assert kinds(head) == [linear, norm, relu, linear, norm, relu, linear, norm]
    assert [layer.weight.shape for layer in head if isinstance(layer, linear)] == [(7, 5), (7, 7), (3, 7)]
    assert head[-1].weight is None
    assert head.out_features == 3


def test_a_head_without_layers_is_refused() -> None:
    with pytest.raises(InputError, match="num_layers=0"):
        MLP(5, hidden_dim=7, out_dim=3, num_layers=0)


def test_simclr_in_one_forward_normalizes_both_views_together() -> None:
    method = SimCLR(encoder(), projector=HEAD, temperature=0.5)
    view1, view2 = views()
    z = method.projector(method.encoder(torch.cat((view1, view2))))
    torch.testing.assert_close(
        method.loss(Views.of(view1, view2)), nt_xent(z[:6], z[6:], temperature=0.5), rtol=0, atol=0
    )


def test_simclr_in_two_forwards_normalizes_each_view_alone() -> None:
    method = SimCLR(encoder(), projector=HEAD, temperature=0.5, concat_views=False)
    view1, view2 = views()
    z1, z2 = method.projector(method.encoder(view1)), method.projector(method.encoder(view2))
    apart = method.loss(Views.of(view1, view2))
    torch.testing.assert_close(apart, nt_xent(z1, z2, temperature=0.5), rtol=0, atol=0)
    method.concat_views = True
    assert abs(method.loss(Views.of(view1, view2)) - apart) > 1e-4


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


def test_byol_kept_parts_are_the_targets() -> None:
    method = make_byol()
    parts = {name.split(".")[0] for name in method.state_dict()}
    assert parts - set(method.local_parts) == {"encoder", "projector", "predictor"}
    assert set(method.local_parts) == {"target_encoder", "target_projector"}


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


def make_moco(*, loss_scale: float | None = None) -> MoCoV3:
    return MoCoV3(encoder(), projector=HEAD, predictor=HEAD, temperature=0.2, ema_decay=0.9, loss_scale=loss_scale)


def test_moco_loss_has_keys_of_the_target() -> None:
    method = make_moco()
    step(method)  # so that target and online differ
    view1, view2 = views()
    q1, q2 = (method.predictor(method.projector(method.encoder(view))) for view in (view1, view2))
    k1, k2 = (method.target_projector(method.target_encoder(view)) for view in (view1, view2))
    expected = 2 * 0.2 * (info_nce(q1, k2, temperature=0.2) + info_nce(q2, k1, temperature=0.2))
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), expected, rtol=0, atol=0)
    assert method.local_parts == ("target_encoder", "target_projector")


def slow_info_nce(q: torch.Tensor, k: torch.Tensor, temperature: float) -> float:
    """Eq. 2 of LW-FedSSL, image by image in float64."""
    q, k = q.double(), k.double()
    total = 0.0
    for i in range(len(q)):
        cosines = [float(q[i] @ k[j] / q[i].norm() / k[j].norm()) / temperature for j in range(len(k))]
        total -= log(exp(cosines[i]) / sum(map(exp, cosines)))
    return total / len(q)


@pytest.mark.parametrize(("loss_scale", "factor"), [(None, 2 * 0.2), (1, 1), (0.5, 0.5)])
def test_moco_loss_is_scaled_as_asked(loss_scale: float | None, factor: float) -> None:
    method = make_moco(loss_scale=loss_scale)
    step(method)
    with torch.no_grad():
        (p1, p2, z1, z2), loss = method.forward_views(*views()), method.loss(Views.of(*views()))
    expected = factor * (slow_info_nce(p1, z2, 0.2) + slow_info_nce(p2, z1, 0.2))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_moco_can_leave_the_patch_embedding_at_its_start() -> None:
    for train in (True, False):
        vit = vit_tiny(channels=1, size=8, depth=1, width=8, heads=1)
        method = MoCoV3(vit, projector=HEAD, predictor=HEAD, temperature=0.2, ema_decay=0.9, train_patches=train)
        frozen = {name for name, parameter in method.encoder.named_parameters() if not parameter.requires_grad}
        assert frozen == (set() if train else {"conv_proj.weight", "conv_proj.bias"})


def test_simsiam_loss_is_symmetric_and_stops_gradients_of_targets() -> None:
    method = SimSiam(encoder(), projector=HEAD, predictor=HEAD)
    view1, view2 = views()
    z1, z2 = (method.projector(method.encoder(view)) for view in (view1, view2))
    p1, p2 = method.predictor(z1), method.predictor(z2)
    expected = negative_cosine(p1, z2) / 2 + negative_cosine(p2, z1) / 2
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), expected)
    assert not negative_cosine(p1.detach(), z2).requires_grad  # no path left to the projector


def test_barlow_twins_loss_compares_projections_of_each_view_by_itself() -> None:
    method = BarlowTwins(encoder(), projector=HEAD, lambd=0.01)
    view1, view2 = views()
    z1, z2 = (method.projector(method.encoder(view)) for view in (view1, view2))
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), barlow_twins(z1, z2, lambd=0.01), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "standard", "l_dawa"),
    [("simclr", nt_xent, nt_xent_one_sided), ("barlow_twins", barlow_twins, barlow_twins_unbiased)],
)
def test_the_loss_is_chosen(method: str, standard, l_dawa) -> None:
    """Each choice is its function of the two views' projections; the recipe with L-DAWA's head takes L-DAWA's."""
    recipe = build_method(compose([f"method=l_dawa/{method}", "encoder.width=4"]).model)
    head = ["encoder.width=4", "method.projector.num_layers=1"]
    for overrides, function in (
        ([f"method={method}"], standard),
        ([f"method={method}", "method.loss=standard"], standard),
        ([f"method={method}", "method.loss=l_dawa"], l_dawa),
    ):
        made = build_method(compose([*overrides, *head]).model)
        kwargs = {"lambd": made.lambd} if method == "barlow_twins" else {"temperature": made.temperature}
        z1, z2 = (made.projector(made.encoder(view)) for view in views())
        if method == "simclr":
            z1, z2 = made.projector(made.encoder(torch.cat(views()))).chunk(2)
        torch.testing.assert_close(made.loss(Views.of(*views())), function(z1, z2, **kwargs), rtol=0, atol=0)
    kwargs = {"lambd": 0.005} if method == "barlow_twins" else {"temperature": 0.07}
    both = recipe.projector(recipe.encoder(torch.cat(views()))).chunk(2)
    each = [recipe.projector(recipe.encoder(view)) for view in views()]
    expected = l_dawa(*(both if method == "simclr" else each), **kwargs)
    torch.testing.assert_close(recipe.loss(Views.of(*views())), expected, rtol=0, atol=0)


MAKERS = {
    "byol": make_byol,
    "simclr": lambda: SimCLR(encoder(), projector=HEAD, temperature=0.5),
    "moco_v3": make_moco,
    "barlow_twins": lambda: BarlowTwins(encoder(), projector=HEAD, lambd=0.01),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_training_lowers_the_loss(make) -> None:
    method = make()
    start = method.loss(Views.of(*views())).item()
    for _ in range(30):
        step(method, lr=0.05)
    assert method.loss(Views.of(*views())).item() < 0.8 * start


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimCLR(encoder(), projector=HEAD, temperature=0), "method.temperature=0"),
        (lambda: make_byol(ema_decay=1.5), "method.ema_decay=1.5"),
        (lambda: make_byol(target_init="alias"), "method.target_init=alias"),
        (lambda: BarlowTwins(encoder(), projector=HEAD, lambd=-1), "method.lambd=-1"),
        (
            lambda: BarlowTwins(encoder(), projector=HEAD, lambd=1, loss="hsic"),
            "^method.loss=hsic must be standard or l_dawa$",
        ),
        (
            lambda: SimCLR(encoder(), projector=HEAD, temperature=0.5, loss="dcl"),
            "^method.loss=dcl must be standard or l_dawa$",
        ),
        (
            lambda: MoCoV3(encoder(), projector=HEAD, predictor=HEAD, temperature=0, ema_decay=0.9),
            "method.temperature=0",
        ),
        (lambda: make_moco(loss_scale=0), "^method.loss_scale=0 must be a number above 0, or null$"),
        (lambda: make_moco(loss_scale="big"), "^method.loss_scale=big must be a number above 0, or null$"),
        (lambda: make_moco(loss_scale=True), "^method.loss_scale=true must be a number above 0, or null$"),
        (
            lambda: SimSiam(encoder(), projector=HEAD, predictor=partial(MLP, hidden_dim=4, out_dim=9)),
            "method.predictor.out_dim=9 must equal method.projector.out_dim=8",
        ),
        (
            lambda: BYOL(encoder(), projector=HEAD, predictor=partial(MLP, hidden_dim=4, out_dim=9), ema_decay=0.9),
            "method.predictor.out_dim=9 must equal method.projector.out_dim=8",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# Lengths of the vectors between a head's layers for representations of length 512, from the papers or their code;
# n: batch normalization at the end.
PAPERS = {
    "l_dawa/simclr": ("512 128", "", {"temperature": 0.07}),
    "l_dawa/barlow_twins": ("512 128", "", {"lambd": 0.005}),
    "fedu/byol": ("512 4096 2048", "2048 4096 2048", {"ema_decay": 0.99}),
    "fedu/simclr": ("512 4096 2048", "", {"temperature": 0.07}),
    "fedu/simsiam": ("512 4096 2048", "2048 4096 2048", {}),
    "fedu2/byol": ("512 2048 512", "512 2048 512", {"ema_decay": 0.99}),
    "fedu2/simclr": ("512 2048 512", "", {"temperature": 0.07}),
    "fedu2/simsiam": ("512 2048 512", "512 2048 512", {}),
    "dec_ssl/simclr": ("512 512 512", "", {"temperature": 0.5}),
    "dec_ssl/simsiam": ("512 2048 2048 512 n", "512 512 512", {}),
    "lw_fedssl/moco_v3": ("512 4096 4096 256 n", "256 4096 256 n", {"target_init": "reset", "loss_scale": 1}),
    "lw_fedssl/byol": ("512 4096 4096 256 n", "256 4096 256 n", {"ema_decay": 0.99, "target_init": "reset"}),
    "lw_fedssl/simclr": ("512 4096 4096 256 n", "", {"temperature": 0.2}),
    "original/byol": ("512 4096 256", "256 4096 256", {"ema_decay": 0.996}),
    "original/simsiam": ("512 2048 2048 2048 n", "2048 512 2048", {}),
    "original/barlow_twins": ("512 8192 8192 8192", "", {"lambd": 0.0051}),
    "original/moco_v3_resnet": ("512 4096 256 n", "256 4096 256", {"temperature": 1.0}),
    "original/moco_v3_vit": ("512 4096 4096 256 n", "256 4096 256 n", {"temperature": 0.2}),
    "original/vicreg": ("512 8192 8192 8192", "", {"sim_weight": 25, "var_weight": 25, "cov_weight": 1}),
    "original/lejepa": ("512 2048 2048 128", "", {"lambd": 0.05, "num_slices": 1024}),
    "original/swav": ("512 2048 128", "", {"temperature": 0.1, "epsilon": 0.05, "queue_size": 3840}),
    "original/dino": ("512 2048 2048 256", "", {"teacher_temperature": 0.07, "ema_schedule": "cosine"}),
    "original/ibot": ("512 2048 2048 256", "", {"teacher_temperature": 0.07, "ema_schedule": "cosine"}),
    "original/fedx": ("512 512 256", "256 512 256", {"temperature": 0.1}),
    "orchestra": ("512 512 512 n", "", {"temperature": 0.1, "ema_decay": 0.996}),
}


def widths(head: MLP) -> str:
    linear = [layer for layer in head if isinstance(layer, nn.Linear)]
    numbers = [linear[0].in_features, *(layer.out_features for layer in linear)]
    return " ".join([*map(str, numbers), *["n"] * isinstance(head[-1], nn.BatchNorm1d)])


@pytest.mark.parametrize("name", PAPERS)
def test_the_heads_of_papers(name: str) -> None:
    projector, predictor, numbers = PAPERS[name]
    masked = MASKED.get(name.rpartition("/")[2])
    encoder = [*masked, "encoder.width=512"] if masked else ["encoder.width=128"]  # representations of length 512
    method = build_method(compose([*encoder, f"method={name}"]).model)
    assert widths(method.projector) == projector
    assert not predictor or widths(method.predictor) == predictor
    assert {key: getattr(method, key) for key in numbers} == numbers


def test_no_paper_is_forgotten() -> None:
    nested = {str(file.relative_to(CONF / "method").with_suffix("")) for file in (CONF / "method").glob("*/*.yaml")}
    masked = {"original/mae", "original/ijepa"}  # a decoder or predictor of patches, see the tests of these methods
    assert nested == {name for name in PAPERS if "/" in name} | masked


def test_heads_without_normalization_and_a_frozen_patch_embedding() -> None:
    fedx = build_method(compose(["method=original/fedx"]).model)
    assert not any(isinstance(layer, nn.BatchNorm1d) for head in (fedx.projector, fedx.predictor) for layer in head)
    overrides = ["method=original/moco_v3_vit", "encoder=vit_tiny", "encoder.depth=1", "encoder.patch=2"]
    moco = build_method(compose(overrides).model)
    assert not moco.encoder.conv_proj.weight.requires_grad


@pytest.mark.parametrize("file", [name for name in WHOLE if name != "distillation"])  # which needs a teacher
def test_every_yaml_builds(file: str) -> None:
    config = OmegaConf.create(
        {"method": OmegaConf.load(CONF / "method" / f"{file}.yaml"), "dataset": {"num_classes": 3}}
    )
    if "projector" in config.method:
        config.method.projector.out_dim = 24
    network = encoder()
    method = instantiate(config.method, encoder=network)
    assert method.encoder is network
    if "projector" in config.method:
        assert method.projector.out_features == 24
    batch = Views.of(*views(), labels=torch.tensor([0, 1, 2, 0, 1, 2]))
    assert method.loss(batch if method.uses_labels else method.inputs(batch)).isfinite()
