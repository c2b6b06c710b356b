"""Heads and methods: what trains, what follows, what is kept, and the loss that comes out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.config.component import Component
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.losses import barlow_twins, barlow_twins_unbiased, nt_xent, nt_xent_one_sided
from fedssl.methods.barlow_twins import BarlowTwins
from fedssl.methods.base import build_method
from fedssl.methods.heads import MLP
from fedssl.methods.simclr import SimCLR
from fedssl.model_arrays import local_names
from fedssl.seeding import torch_generator
from fedssl.views import Views
from tests.cases import some
from tests.federation import Federation
from tests.fedssl.methods.made import HEAD, encoder, mean_by_images, step, views
from tests.fedssl.methods.test_byol import make_byol
from tests.fedssl.methods.test_moco_v3 import make_moco
from tests.methods import MASKED, overrides_of

CONF = Path(__file__).parents[3] / "conf"


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


REFUSED = {
    "simclr temperature=0": "a number above 0",
    "simclr loss=dcl": "standard or l_dawa",
    "simclr projector.num_layers=0": "an integer from 1",
    "byol ema_decay=1.5": "at most 1",
    "byol target_init=alias": "persist or reset or average",
    "barlow_twins lambd=-1": "a number of at least 0",
    "barlow_twins loss=hsic": "standard or l_dawa",
    "moco_v3 temperature=0": "a number above 0",
    "moco_v3 loss_scale=0": "a number above 0, or null",
    "moco_v3 loss_scale=big": "a number above 0, or null",
    "moco_v3 loss_scale=true": "a number above 0, or null",
    "fedx temperature=0": "a number above 0",
    "vicreg sim_weight=-1.0": "a number of at least 0",
    "vicreg var_weight=-1.0": "a number of at least 0",
    "vicreg cov_weight=-1.0": "a number of at least 0",
    "dino student_temperature=0": "a number above 0",
    "dino teacher_temperature=-1": "a number above 0",
    "dino warmup_teacher_temperature=0": "a number above 0",
    "dino warmup_rounds=-1": "an integer of at least 0",
    "dino center_momentum=1.5": "at most 1",
    "dino freeze_last_layer_rounds=0.5": "an integer",
    "dino ema_schedule=linear": "constant or cosine",
    "dino ema_decay=2": "at most 1",
    "ibot patch_weight=-1": "a number of at least 0",
    "mae decoder_width=0": "an integer from 1 to 65536",
    "mae decoder_depth=0": "an integer from 1 to 1000",
    "mae decoder_heads=0": "an integer from 1 to 65536",
    "mar gamma_max=-1": "a number of at least 0",
    "mar num_latents=1": "an integer from 2 to 65536",
    "lejepa lambd=1.5": "at most 1",
    "lejepa num_slices=0": "an integer from 1 to 65536",
    "lejepa num_points=1": "an integer from 2 to 1024",
    "lejepa t_max=0.0": "a number above 0 and at most 100",
    "swav num_prototypes=1": "an integer of at least 2",
    "swav temperature=0.0": "a number above 0",
    "swav epsilon=0.0": "a number above 0",
    "swav iterations=0": "an integer of at least 1",
    "swav freeze_prototypes_rounds=-1": "an integer of at least 0",
    "swav queue_size=-1": "an integer of at least 0",
    "swav queue_start_round=0": "an integer of at least 1",
    "swav match_prototypes=1": "true or false",
    "fedca sent_per_round=-1": "an integer of at least 0",
    "fedca dictionary_capacity=0": "an integer of at least 1",
    "fedca alignment_weight=-1": "a number of at least 0",
    "fedca alignment_weight=nan": "a finite number",
    "orchestra local_clusters=0": "an integer of at least 1",
    "orchestra global_clusters=1": "an integer of at least 2",
    "orchestra temperature=0": "a number above 0",
    "fedsc own_share=1.5": "at most 1",
    "fedsc max_square=0": "a number above 0",
    "ssd share=0": "a number above 0",
    "ssd distillation_weight=-1": "a number of at least 0",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_out_of_range_are_refused_in_one_sentence(setting: str) -> None:
    method, override = setting.split()
    with pytest.raises(InputError, match=f"^method.{override} must be {REFUSED[setting]}"):
        compose([f"method={method}", f"method.{override}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("method=simsiam method.predictor.out_dim=9", "method.predictor.out_dim=9 must equal method.projector.out_dim"),
        ("method=byol method.predictor.out_dim=9", "method.predictor.out_dim=9 must equal method.projector.out_dim"),
        ("method=fedx method.predictor.out_dim=9", "method.predictor.out_dim=9 must equal method.projector.out_dim"),
        ("method=fedca method.dictionary_capacity=2", "method.dictionary_capacity=2 must be at least method.sent_per_"),
        ("method=orchestra method.queue_size=2", "method.queue_size=2 must be at least method.local_clusters="),
    ],
)
def test_settings_that_exclude_each_other_are_refused(overrides: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_method(compose(overrides.split()).model)


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


DEFAULT_PAPERS = ("l_dawa/simclr", "fedu/byol", "dec_ssl/simsiam", "lw_fedssl/moco_v3", "original/dino")


@pytest.mark.parametrize("name", some(PAPERS, default=DEFAULT_PAPERS))
def test_the_heads_of_papers(name: str) -> None:
    projector, predictor, numbers = PAPERS[name]
    masked = MASKED.get(name.rpartition("/")[2])
    encoder = [*masked, "encoder.width=512"] if masked else ["encoder.width=128"]  # representations of length 512
    with torch.device("meta"):  # no weights are drawn
        method = build_method(compose([*encoder, f"method={name}"]).model)
    assert widths(method.projector) == projector
    assert not predictor or widths(method.predictor) == predictor
    assert {key: getattr(method, key) for key in numbers} == numbers


class Headless(SimCLR):
    """A user's method that forgets its encoder."""

    def __init__(self, encoder) -> None:
        nn.Module.__init__(self)
        self.net = encoder


def the_encoder(encoder: nn.Module) -> nn.Module:
    return encoder


def test_a_method_without_its_encoder_is_refused() -> None:
    model = compose(["encoder.width=4"]).model
    custom = replace(model, method=Component({"_target_": f"{__name__}.Headless"}))
    with pytest.raises(InputError, match=r"Headless has no encoder; call super\(\).__init__\(encoder\)"):
        build_method(custom)
    custom = replace(model, method=Component({"_target_": f"{__name__}.the_encoder"}))
    with pytest.raises(InputError, match="the_encoder makes a ConvSmall; return a fedssl.methods.base.SSLMethod"):
        build_method(custom)


def test_no_paper_is_forgotten() -> None:
    nested = {str(file.relative_to(CONF / "method").with_suffix("")) for file in (CONF / "method").glob("*/*.yaml")}
    masked = {"original/mae", "original/ijepa"}  # a decoder or predictor of patches, see the tests of these methods
    assert nested == {name for name in PAPERS if "/" in name} | masked


def test_heads_without_normalization_and_a_frozen_patch_embedding() -> None:
    with torch.device("meta"):
        fedx = build_method(compose(["method=original/fedx"]).model)
    assert not any(isinstance(layer, nn.BatchNorm1d) for head in (fedx.projector, fedx.predictor) for layer in head)
    overrides = ["method=original/moco_v3_vit", "encoder=vit_tiny", "encoder.depth=1", "encoder.patch=2"]
    with torch.device("meta"):
        moco = build_method(compose(overrides).model)
    assert not moco.encoder.conv_proj.weight.requires_grad


TEACHER = "target_encoder target_projector target_prototypes"
# Exchanged parts, and those that stay with a client.
PARTS = {
    "vicreg": ("encoder projector", ""),
    "swav method.freeze_prototypes_rounds=0": ("encoder projector prototypes", ""),
    "dino method.freeze_last_layer_rounds=0": ("encoder projector prototypes center", TEACHER),
    "dino method.freeze_last_layer_rounds=0 method.target_init=average": (
        f"encoder projector prototypes center {TEACHER}",
        "",
    ),
    "ibot method.freeze_last_layer_rounds=0": ("encoder projector prototypes center patch_center mask_token", TEACHER),
    "ibot method.freeze_last_layer_rounds=0 method.target_init=average": (
        f"encoder projector prototypes center patch_center mask_token {TEACHER}",
        "",
    ),
    "ijepa": ("encoder predictor", "target_encoder"),
    "mae": ("encoder decoder", ""),
}


@pytest.mark.parametrize(
    "method", some(PARTS, default=[one for one in PARTS if "freeze_last" not in one or "average" in one])
)
def test_the_server_averages_exchanged_parts_by_images(tmp_path: Path, method: str) -> None:
    name, *changed = method.split()
    exchanged, local = (set(parts.split()) for parts in PARTS[method])
    overrides = ["strategy=fedavg", "num_clients=2", "partition=dirichlet", "partition.alpha=0.3", "optimizer.lr=0.1"]
    federation = Federation(tmp_path, *overrides_of(name), *changed, *overrides)
    layers = federation.run(1)
    assert {name.partition(".")[0] for name in layers} == exchanged
    assert {name.partition(".")[0] for name in local_names(federation.method)} == local
    for name, array in layers.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, mean_by_images(federation, name), rtol=1e-5, atol=1e-6, err_msg=name)
    one, other = (update["arrays"] for update in federation.updates)
    differ = {name.partition(".")[0] for name in layers if np.abs(one[name].numpy() - other[name].numpy()).max() > 1e-6}
    assert differ == exchanged


@pytest.mark.parametrize("name", ["dino", "fedca", "ibot", "lejepa", "mar", "orchestra", "simclr", "swav", "vicreg"])
def test_bf16_passes_end_in_a_loss_of_full_precision(name: str) -> None:
    settings = compose(["encoder.width=4", *overrides_of(name)])
    method = build_method(settings.model)
    images = torch.randint(256, (8, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    batch = method.inputs(settings.training.augmentation.instantiate()(images, torch_generator(0, "views")))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = method.loss(batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, method.loss(batch), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("name", "augmentation"), [("ijepa", "ijepa"), ("mae", "mae"), ("mar", "mae")])
def test_an_encoder_without_tokens_is_refused(name: str, augmentation: str) -> None:
    remedy = f"set encoder=vit_tiny augmentation={augmentation}"
    message = rf"^{name.upper()} encodes some of the patches .* ConvSmall cannot; {remedy}$"
    with pytest.raises(InputError, match=message):
        build_method(compose([f"method={name}", "encoder=conv_small"]).model)
