"""Views of several sizes: who encodes smaller ones, in which mode, and what is refused before training."""

import math

import pytest
import torch

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.export import load_encoder
from fedssl.machine.meta_device import shapes_only
from fedssl.methods.base import build_method
from fedssl.methods.lejepa import LeJEPA
from fedssl.methods.swav import SwAV
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, method_inputs, train
from simulation.run import run
from tests.methods import MASKED, METHODS, overrides_of
from tests.runs import read_lines

TINY = ["encoder=vit_tiny", "encoder.patch=2", "encoder.width=16", "encoder.depth=1", "encoder.heads=2"]
HALF = [f"++augmentation.views.{number}.size=0.5" for number in (0, 1)]
SHORT = ["rounds=1", "num_clients=2", "local_epochs=1", "dataset.limit=60", "final_evaluation=none"]
CROPS = {"ibot": ["augmentation=digits_ibot"]}
WITH_TWO_VIEWS = [name for name in METHODS if name not in ("ijepa", "mae", "mar")]
CONCATENATING = ("distillation", "fedca", "ibot", "simclr", "supervised")
# Recipes whose global views are the first two.
AUGMENTATIONS = {"ibot": ["augmentation.views=[{mask: {kind: random, patch: 1}},{mask: {kind: random, patch: 1}}]"]}
MODES = {"swav": SwAV.failure_modes, "lejepa": LeJEPA.failure_modes}
IMAGES = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch_generator(0, "pictures"))


def build(*overrides):
    """Return a method, as a client prepares it, and its training, with the term of the strategy."""
    settings = compose([*overrides, "batch_size=6", "local_epochs=1"])
    method = build_method(settings.model)
    training = LocalTrainer.build(settings.training, method, term=settings.algorithm.strategy.instantiate().client.term)
    method.start_round(first=True)
    return method, training


def trained_loss(*overrides):
    method, training = build(*overrides)
    labels, generator = torch.arange(6) % 2, torch_generator(0, "train")
    return train(
        method, TensorImages(IMAGES), torch.arange(6), training=training, generator=generator, labels=labels
    ).loss


def crops_of(name):
    """Return overrides of local views, or of smaller global ones for a method without local views."""
    accepted = build_method(compose(overrides_of(name)).model).accepted_views
    if accepted.local:
        return CROPS.get(name, ["augmentation=digits_multi_crop"])
    return HALF[: accepted.max_global]


def with_failure_modes():
    return [name for name in METHODS if build_method(compose(overrides_of(name)).model).failure_modes]


@pytest.mark.parametrize("name", with_failure_modes())
def test_failures_are_diagnosed_on_smaller_views(name):
    """By a vision transformer in eval mode."""
    method, training = build(*overrides_of(name), *([] if name in MASKED else TINY), *crops_of(name))
    views = training.augment(IMAGES, torch_generator(0, "views"))
    assert min(view.shape[2] for view in views.images) == 4
    method.eval()
    with torch.no_grad():
        found = method.diagnose(method_inputs(method, views, None, torch_generator(0, "inputs")))
    assert {mode.diagnostic for mode in method.failure_modes} <= found.keys()
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedx"],
        ["method=fedca", "method.alignment_weight=1"],
        ["method=byol", "strategy=moon"],
        ["method=simclr", "regularizer=alignment"],
        ["method=simclr", "regularizer=feature_distillation"],
    ],
)
def test_copies_in_eval_mode_encode_smaller_views(overrides):
    assert math.isfinite(trained_loss(*overrides, *TINY, *HALF))


@pytest.mark.parametrize("method", ["swav", "lejepa"])
def test_a_run_with_local_views_measures_collapse(tmp_path, method):
    run([*TINY, *SHORT, f"method={method}", "augmentation=digits_multi_crop", f"output_dir={tmp_path / 'out'}"])
    (row,) = [row for row in read_lines(tmp_path / "out" / "health.jsonl") if row["client"] is None]
    assert {"lidar", *(mode.diagnostic for mode in MODES[method])} <= row.keys()
    encoder = load_encoder(tmp_path / "out" / "encoder.pt")  # which takes images only
    with pytest.raises(InputError, match="^encoder.size=8 but the images have 4x4 pixels"):
        encoder(torch.rand(2, 1, 4, 4))


def test_a_run_with_smaller_global_views_measures_collapse(tmp_path):
    run([*TINY, *SHORT, "method=byol", *HALF, f"output_dir={tmp_path / 'out'}"])
    assert all("lidar" in row for row in read_lines(tmp_path / "out" / "health.jsonl"))


def loss_or_refusal(*overrides):
    try:
        return trained_loss(*overrides)
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(("large", "small"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", WITH_TWO_VIEWS)
def test_global_views_of_two_sizes_are_trained_or_refused(name, large, small):
    """A refusal names a setting that helps."""
    size = f"augmentation.views.{small}.size"
    own = [*overrides_of(name), *AUGMENTATIONS.get(name, []), *([] if name in MASKED else ["encoder.width=4"])]
    found = loss_or_refusal(*own, f"{size}=0.5")
    if name in CONCATENATING:
        kind = type(build_method(compose(own).model)).__name__
        sizes = f"augmentation.views.{large} has views of 8 pixels and augmentation.views.{small} of 4"
        assert found == f"{kind} concatenates whole views, but {sizes}; set {size}=1"
        found = trained_loss(*own, f"{size}=0.5", f"{size}=1")
    assert math.isfinite(found)


@pytest.mark.parametrize(
    ("override", "user"),
    [
        ("strategy=moon", "the strategy's term"),
        ("regularizer=alignment", "Alignment"),
        ("regularizer=featarc", "Alignment"),
        ("regularizer=feature_distillation", "FeatureDistillation"),
        ("regularizer=fur", None),
        ("regularizer=decorr", None),
    ],
)
def test_a_term_that_concatenates_views_refuses_two_sizes(override, user):
    own = ["method=byol", "encoder.width=4", "augmentation.views.1.size=0.5", override]
    found = loss_or_refusal(*own)
    if user is not None:
        start, _, remedy = found.rpartition("; set ")
        assert start.startswith(f"{user} concatenates whole views, but augmentation.views.0 has")
        found = trained_loss(*own, remedy)
    assert math.isfinite(found)
    assert math.isfinite(
        loss_or_refusal(*own, *(["strategy.weight=0"] if "moon" in override else ["regularizer.weight=0"]))
    )


def test_simclr_encodes_two_sizes_one_after_the_other():
    assert math.isfinite(trained_loss("method.concat_views=false", "augmentation.views.1.size=0.5"))


def test_views_that_a_term_does_not_use_may_be_smaller():
    third = ["augmentation.views=[{},{},{size: 0.5}]", "regularizer=alignment"]
    assert math.isfinite(trained_loss("method=dino", "encoder.width=4", *third))
    third[0] = "augmentation.views=[{size: 0.75},{},{size: 0.5}]"
    message = "views.1 has views of 8 pixels and augmentation.views.0 of 6; set augmentation.views.0.size=1$"
    with pytest.raises(InputError, match=message):
        build("method=dino", "encoder.width=4", *third)
    message = "; set augmentation.views.0.size=1 augmentation.views.2.size=1$"
    with pytest.raises(InputError, match=message):
        build("method=supervised", "encoder.width=4", third[0])


CIFAR = ["dataset=cifar10", "method=dino", "augmentation=multi_crop"]


@pytest.mark.parametrize(
    ("overrides", "size", "takes"),
    [
        ([*CIFAR, "encoder=torchvision", "encoder.name=vit_b_16"], 16, "encoder.name=vit_b_16 takes only 32"),
        (
            [*CIFAR, "encoder=timm", "encoder.name=test_vit", "augmentation.views.2.size=0.7"],
            22,
            "encoder.name=test_vit takes only 32 and smaller multiples of 16",
        ),
        (
            [*CIFAR, "encoder=vit_tiny", "encoder.depth=1", "augmentation.views.2.size=0.7"],
            22,
            "the encoder takes only 32 and smaller multiples of 4",
        ),
    ],
)
def test_views_that_an_encoder_does_not_take_are_named(overrides, size, takes):
    """Local views are six of one recipe, the third; the named setting helps."""
    with shapes_only():  # the encoder has 86 million weights
        remedy = "augmentation.views.2.size=1"
        message = f"augmentation.views.2 has views of {size} pixels, but {takes}; set {remedy}, or another encoder"
        with pytest.raises(InputError, match=f"^{message}$"):
            build(*overrides)
        build(*overrides, remedy)


def test_other_differences_of_images_are_told_as_before():
    own = [*CIFAR, "encoder=vit_tiny", "encoder.depth=1"]
    with pytest.raises(InputError, match="^encoder.size=16 but the images have 32x32 pixels"):
        build(*own, "encoder.size=16")
    with pytest.raises(InputError, match="^encoder.channels=1 but the images have 3 channels"):
        build(*own, "encoder.channels=1")
