"""DINO: the loss from its parts, the center, the entropies, schedules over rounds, and what a federation exchanges."""

from functools import partial
from math import cos, pi

import pytest
import torch

from fedssl.losses import dino
from fedssl.methods.dino import DINO, Center, assignment_entropies
from fedssl.methods.heads import MLP, PrototypeHead
from fedssl.model_arrays import exchanged_names, local_names
from tests.failures import failures_after
from tests.fedssl.methods.made import draw, encoder, multi_crop, step

WORDS = ["method=dino", "augmentation=digits_multi_crop"]
SMALL = ["method.projector.hidden_dim=16", "method.projector.out_dim=6", "method.num_prototypes=10", "batch_size=16"]
TEACHER = {"target_encoder", "target_projector", "target_prototypes"}
SETTINGS = {
    "student_temperature": 0.1,
    "teacher_temperature": 0.07,
    "warmup_teacher_temperature": 0.04,
    "warmup_rounds": 3,
    "center_momentum": 0.75,
    "freeze_last_layer_rounds": 1,
    "ema_decay": 0.5,
}


def make_dino(**changed) -> DINO:
    projector = partial(MLP, hidden_dim=16, out_dim=6, num_layers=3, batch_norm=False, activation="gelu")
    return DINO(encoder(), projector=projector, num_prototypes=10, **(SETTINGS | changed))


def test_prototypes_return_cosines() -> None:
    """(3, 4) with the prototypes (1, 0) and (0, 5): 3/5 and 4/5, whatever the lengths."""
    head = PrototypeHead(2, num_prototypes=2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 5.0]]))
    torch.testing.assert_close(head(torch.tensor([[3.0, 4.0], [30.0, 40.0]])), torch.tensor([[0.6, 0.8]] * 2))
    assert head(draw(3, 7, 2).float()).shape == (3, 7, 2)  # tokens of images
    assert head.out_features == 2


@pytest.mark.parametrize("local", [0, 2])
def test_the_loss_is_that_of_its_forward_passes(local: int) -> None:
    method, views = make_dino(), multi_crop(num_local=local)
    step(method, views)  # teacher and student differ, and the center is not zero
    center = method.center.running_mean.clone()
    assert center.abs().min() > 0
    images = views.images
    student = [method.encoder(torch.cat(images[:2]))] + ([method.encoder(torch.cat(images[2:]))] if local else [])
    student = method.prototypes(method.projector(torch.cat(student))).chunk(2 + local)
    teacher = method.target_encoder(torch.cat(images[:2]))
    teacher = method.target_prototypes(method.target_projector(teacher)).chunk(2)
    expected = dino(student, teacher, center=center, student_temperature=0.1, teacher_temperature=0.04)
    torch.testing.assert_close(method.loss(views), expected, rtol=0, atol=0)


def test_the_teacher_does_not_see_local_views() -> None:
    method = make_dino()
    seen = []
    method.target_encoder.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    method.loss(multi_crop(num_local=2))
    assert seen == [(12, 1, 8, 8)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0.25] * 4] * 2, (1, 1)),
        ([[0.0, 1.0, 0.0, 0.0]] * 2, (0, 0)),
        ([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]], (0, 0.5)),  # log 2 / log 4
        ([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], (0.5, 1)),
    ],
)
def test_entropies_by_hand(rows, expected) -> None:
    assert tuple(map(float, assignment_entropies(torch.tensor(rows)))) == pytest.approx(expected, abs=1e-6)


def test_the_student_is_trained_and_the_teacher_follows() -> None:
    method, views = make_dino(freeze_last_layer_rounds=0), multi_crop(num_local=2)
    before = {name: value.detach().double() for name, value in method.named_parameters()}
    step(method, views)
    for name, value in method.named_parameters():
        if name.startswith("target_"):
            assert value.grad is None
            online = dict(method.named_parameters())[name.removeprefix("target_")]
            torch.testing.assert_close(value.double(), 0.5 * before[name] + 0.5 * online.double(), rtol=1e-6, atol=1e-7)
        else:
            assert value.grad.abs().sum() > 0
            assert not torch.equal(value.double(), before[name])


def test_prototypes_are_frozen_in_the_first_rounds() -> None:
    method, views = make_dino(freeze_last_layer_rounds=2), multi_crop(num_local=2)
    method.start_round(first=True)
    assert "prototypes.weight" in method.trainable
    for method.round in (1, 2, 3):
        method.start_round(first=method.round == 1)
        method.train()
        before = {part: method.get_parameter(f"{part}.weight").clone() for part in ("prototypes", "target_prototypes")}
        step(method, views)
        for part, old in before.items():
            assert torch.equal(method.get_parameter(f"{part}.weight"), old) == (method.round < 3), (part, method.round)
    assert not torch.equal(method.encoder.blocks[0][0].weight, method.target_encoder.blocks[0][0].weight)
    assert not method.target_prototypes.weight.requires_grad


def test_schedules_over_rounds() -> None:
    """The temperature 0.04, 0.05, 0.06, 0.07, 0.07; the decay 1 - 0.5 (1 + cos(pi t)) / 2 with t = 0, 1/4, ..., 1."""
    constant, growing = make_dino(), make_dino(ema_schedule="cosine")
    assert constant.step_constants == (0.5, 0.04)
    assert make_dino(warmup_rounds=0).step_constants == (0.5, 0.07)
    growing.rounds = 5
    for number, temperature in enumerate([0.04, 0.05, 0.06, 0.07, 0.07]):
        growing.round = number + 1
        decay = 1 - 0.5 * (1 + cos(pi * number / 4)) / 2
        assert growing.step_constants == pytest.approx((decay, temperature))
        assert constant.current_decay == 0.5
    with torch.no_grad():  # decay 1: the teacher stays as it is
        for parameter in growing.encoder.parameters():
            parameter.add_(1)
    before = [parameter.clone() for parameter in growing.target_encoder.parameters()]
    growing.on_step_end()
    assert all(map(torch.equal, before, growing.target_encoder.parameters()))
    growing.round = 1
    growing.on_step_end()
    torch.testing.assert_close(next(growing.target_encoder.parameters()), before[0] + 0.5)


@pytest.mark.parametrize("target_init", ["persist", "reset", "average"])
def test_what_is_exchanged(target_init: str) -> None:
    method = make_dino(target_init=target_init)
    teacher = TEACHER if target_init == "average" else set()
    sent = {name.partition(".")[0] for name in exchanged_names(method)}
    assert sent == {"encoder", "projector", "prototypes", "center", *teacher}
    assert {name.partition(".")[0] for name in local_names(method)} == TEACHER - teacher


@pytest.mark.parametrize(
    ("target_init", "first", "copied"),
    [("persist", True, True), ("persist", False, False), ("reset", False, True), ("average", True, False)],
)
def test_the_teacher_at_the_start_of_a_round(target_init: str, first: bool, copied: bool) -> None:
    method = make_dino(target_init=target_init, freeze_last_layer_rounds=0)
    step(method, multi_crop(num_local=2))
    before = method.target_prototypes.weight.clone()
    method.start_round(first=first)
    assert torch.equal(method.target_prototypes.weight, method.prototypes.weight) == copied
    assert torch.equal(method.target_prototypes.weight, before) != copied


def test_a_warm_teacher_is_uniform(tmp_path) -> None:
    temperatures = ["method.teacher_temperature=1", "method.warmup_teacher_temperature=1"]
    (failure,) = failures_after(tmp_path, 2, *WORDS, *SMALL, *temperatures)
    assert "all prototypes equally; lower method.teacher_temperature" in failure


def test_without_centering_one_prototype_is_left(tmp_path) -> None:
    uncentered = ["method.center_momentum=1", "method.teacher_temperature=0.01", "optimizer=sgd", "optimizer.lr=0.1"]
    (failure,) = failures_after(tmp_path, 2, *WORDS, *SMALL, *uncentered)
    assert "all images to one prototype; lower method.center_momentum" in failure


def test_the_center_moves_in_train_mode_only():
    center = Center(2, momentum=0.75)
    center.eval().update(torch.ones(4, 2))
    assert center.running_mean.tolist() == [0, 0]
    center.train().update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert center.running_mean.tolist() == [0.5, 1]  # a quarter of the means, 2 and 4
