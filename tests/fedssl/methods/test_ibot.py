"""iBOT: the loss from its forward passes, hidden patches, both centers, and what it needs of the encoder."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fedssl.augmentation.patch_masks import padded_numbers
from fedssl.config.load import compose
from fedssl.encoders import conv_small, vit_tiny
from fedssl.errors import InputError
from fedssl.losses import dino
from fedssl.methods.base import build_method
from fedssl.methods.heads import MLP
from fedssl.methods.ibot import IBOT
from fedssl.training import LocalTrainer
from fedssl.views import LOCAL, Mask, View, Views
from tests.fedssl.methods.made import draw, step
from tests.methods import overrides_of

WORDS = overrides_of("ibot")
SETTINGS = {
    "num_prototypes": 10,
    "student_temperature": 0.1,
    "teacher_temperature": 0.05,
    "warmup_teacher_temperature": 0.05,
    "warmup_rounds": 0,
    "center_momentum": 0.75,
    "freeze_last_layer_rounds": 0,
    "ema_decay": 0.5,
}
PATCHES = 16  # of 2 x 2 pixels, in images of 8 x 8


def make_ibot(*, registers: int = 0, batch_norm: bool = False, **changed) -> IBOT:
    torch.manual_seed(0)
    encoder = vit_tiny(channels=1, size=8, patch=2, depth=2, width=8, heads=2, registers=registers)
    projector = partial(MLP, hidden_dim=16, out_dim=6, num_layers=3, batch_norm=batch_norm, activation="gelu")
    return IBOT(encoder, projector=projector, **(SETTINGS | changed))


def mask_of(hidden: Tensor) -> Mask:
    return Mask(hidden, hidden_numbers=padded_numbers(hidden))


def make_views(*, local: int = 2) -> Views:
    """Global views of 8 x 8 pixels with hidden patches, none of them in the first image, and local ones of 4 x 4."""
    hidden = [draw(4, PATCHES, seed=seed) > 0.5 for seed in (11, 12)]
    for patches in hidden:
        patches[0] = False
    views = [View(draw(4, 1, 8, 8, seed=seed).float(), mask=mask_of(hidden[seed])) for seed in (0, 1)]
    return Views((*views, *(View(draw(4, 1, 4, 4, seed=3 + number).float(), LOCAL) for number in range(local))))


def slow_patch_loss(student: Tensor, teacher: Tensor, center: Tensor, numbers: list[int]) -> float:
    """Transcribe the loss of hidden patches: the mean over images of the mean over their patches, each counted once."""
    losses: dict[int, list[float]] = {image: [] for image in range(8)}
    rows = dict(zip(numbers, zip(student, teacher, strict=True), strict=False))  # repeated ones have equal rows
    for number, (s, t) in rows.items():
        p_t, p_s = ((t - center) / 0.05).softmax(dim=0), (s / 0.1).softmax(dim=0)
        losses[number // PATCHES].append(-sum(p * math.log(q) for p, q in zip(p_t.tolist(), p_s.tolist(), strict=True)))
    return sum(sum(values) / len(values) for values in losses.values() if values) / 8


@pytest.mark.parametrize(
    ("local", "registers", "weight", "batch_norm"),
    [(2, 0, 1.0, False), (0, 0, 1.0, False), (2, 2, 0.5, False), (2, 0, 1.0, True)],
)
def test_the_loss_is_that_of_its_forward_passes(local: int, registers: int, weight: float, batch_norm: bool) -> None:
    """In float64: tokens of the masked global views, class tokens of the local ones, and the teacher's of all.

    The heads see hidden patches only, of which the first are repeated.
    """
    method = make_ibot(registers=registers, patch_weight=weight, batch_norm=batch_norm)
    views = make_views(local=local)
    step(method, views)  # teacher, centers and mask token are not at their start
    method, views = method.double(), views.with_images([images.double() for images in views.images])
    centers = [method.center.running_mean.clone(), method.patch_center.running_mean.clone()]
    assert all(center.abs().min() > 0 for center in (*centers, method.mask_token))
    hidden = torch.cat([views[0].mask.hidden, views[1].mask.hidden])
    numbers = []
    for view in (0, 1):
        own = [number for number in range(view * 64, view * 64 + 64) if hidden.flatten()[number]]
        assert len(own) % 4
        numbers += own + own[: 4 - len(own) % 4]  # of 64 patches a 16th are 4

    def tokens_of(encoder, **hidden) -> tuple[Tensor, Tensor]:
        tokens = encoder.forward_tokens(encoder.embed(torch.cat(views.global_images), **hidden))
        assert tokens.shape == (8, 1 + registers + PATCHES, 8)
        return tokens[:, 0], tokens[:, 1 + registers :].reshape(8 * PATCHES, 8)[numbers]

    h, patches = tokens_of(method.encoder, hidden=hidden, mask_token=method.mask_token)
    h = torch.cat([h, *([method.encoder(torch.cat(views.local_images))] if local else [])])
    student = method.prototypes(method.projector(h)).chunk(2 + local)
    student_patches = method.prototypes(method.projector(patches))
    h, patches = tokens_of(method.target_encoder)
    teacher = method.target_prototypes(method.target_projector(h)).chunk(2)
    teacher_patches = method.target_prototypes(method.target_projector(patches))
    expected = dino(student, teacher, center=centers[0], student_temperature=0.1, teacher_temperature=0.05).item()
    expected += weight * slow_patch_loss(student_patches, teacher_patches, centers[1], numbers)
    assert method.loss(views).item() == pytest.approx(expected, rel=1e-7)  # weights are float32
    centers_now, seen = (method.center, method.patch_center), (torch.cat(teacher), teacher_patches)
    for center, old, logits in zip(centers_now, centers, seen, strict=True):
        torch.testing.assert_close(center.running_mean, 0.75 * old + 0.25 * logits.mean(dim=0))  # Eq. 4 of DINO


def test_the_student_does_not_see_hidden_patches() -> None:
    """Other pixels in them change the teacher's part of the loss only."""
    method, views = make_ibot(), make_views()
    step(method, views)
    seen = []
    method.encoder.encoder.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    method.loss(views)
    masks = [view.mask.hidden.view(4, 1, 4, 4) for view in views.views[:2]]
    pixels = [mask.repeat_interleave(2, 2).repeat_interleave(2, 3) for mask in masks]
    other = [torch.where(hidden, 9.0, view.images) for view, hidden in zip(views, pixels, strict=False)]
    method.loss(views.with_images([*other, *views.local_images]))
    torch.testing.assert_close(seen[0], seen[2], rtol=0, atol=0)
    torch.testing.assert_close(seen[1], seen[3], rtol=0, atol=0)  # local views
    assert pixels[0].any()


def test_without_weight_or_hidden_patches_it_is_dino() -> None:
    """The mask token is not used, and the loss is that of the class tokens."""
    views = make_views()
    shown = [View(view.images, mask=mask_of(view.mask.hidden & False)) for view in views.views[:2]]
    nothing = Views((*shown, *views.views[2:]))
    torch.testing.assert_close(make_ibot(patch_weight=0).loss(nothing), make_ibot().loss(nothing), rtol=0, atol=0)
    method = make_ibot()
    expected = super(IBOT, method).loss(nothing)
    torch.testing.assert_close(make_ibot().loss(nothing), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "encoder",
    [
        lambda: conv_small(channels=1, size=8, width=4),
        lambda: vit_tiny(channels=1, size=8, patch=2, depth=1, width=8, heads=2, pool="mean", registers=1),
    ],
)
def test_an_encoder_without_class_token_is_refused(encoder) -> None:
    with pytest.raises(InputError, match="^IBOT needs .* set encoder=vit_tiny encoder.pool=token augmentation=ibot$"):
        IBOT(encoder(), projector=partial(MLP, hidden_dim=4, out_dim=4), **SETTINGS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["augmentation=digits_multi_crop"], "IBOT trains on .* set augmentation=ibot"),
        (["regularizer=fur", "regularizer.part=encoder"], "needs the encoder's output"),
    ],
)
def test_views_without_masks_and_regularizers_of_the_encoder_are_refused(overrides, message: str) -> None:
    settings = compose([*WORDS, *overrides])
    with pytest.raises(InputError, match=message):
        LocalTrainer.build(settings.training, build_method(settings.model))
