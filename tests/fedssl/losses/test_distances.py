"""Losses of targets against their equations, numbers computed by hand, and where gradients flow."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.losses import byol, feature_mse, negative_cosine, similarity_distillation, teacher_distance
from tests.fedssl.losses.vectors import E1, E2, assert_gradients, cosine, draw, slow_cross_entropy, slow_softmax


def test_negative_cosine_by_hand() -> None:
    """Angles of 0, 90 and 180 degrees, then 45 degrees twice: -(1 + 0 - 1 + 2 / sqrt 2) / 5."""
    p = torch.stack((E1, E1, E1, E1, E2))
    z = torch.stack((2 * E1, E2, -E1, E1 + E2, E1 + E2))
    assert negative_cosine(p, z).item() == pytest.approx(-math.sqrt(2) / 5, rel=1e-6)


def test_byol_by_hand() -> None:
    """cos(p1, z2) = 1 and 0 for the two images: mean of 0 and 2 is 1. cos(p2, z1) = -1 and 1 / sqrt 2: mean of 4 and
    2 - sqrt 2 is 3 - sqrt 2 / 2. Sum: 4 - sqrt 2 / 2."""
    p1, z2 = torch.stack((E1, E1)), torch.stack((E1, E2))
    p2, z1 = torch.stack((E2, E1)), torch.stack((-5 * E2, E1 + E2))
    assert byol(p1, z2, p2, z1).item() == pytest.approx(4 - math.sqrt(2) / 2, rel=1e-6)


def test_byol_is_its_equation() -> None:
    """Eq. 2 is the squared distance of the normalized vectors."""
    p1, z2, p2, z1 = draw(6, 5, count=4)

    def slow(p: Tensor, z: Tensor) -> float:
        squares = [float(((a / a.norm() - b / b.norm()) ** 2).sum()) for a, b in zip(p, z, strict=True)]
        return sum(squares) / len(squares)

    assert byol(p1, z2, p2, z1).item() == pytest.approx(slow(p1, z2) + slow(p2, z1), rel=1e-12)


def test_no_gradient_flows_into_targets() -> None:
    p1, z2, p2, z1 = (tensor.requires_grad_() for tensor in draw(4, 5, count=4))
    (byol(p1, z2, p2, z1) + negative_cosine(p1, z1)).backward()
    assert z1.grad is None
    assert z2.grad is None
    assert p1.grad.abs().max() > 0
    assert p2.grad.abs().max() > 0


SHARP = {"student_temperature": 0.5, "teacher_temperature": 0.2}


def test_teacher_distance_by_hand() -> None:
    """Directions E1 and E1 are 0 apart, E1 and E2 have the squared distance 2, E1 and -E1 have 4: the mean is 2."""
    distance = teacher_distance(torch.stack((E1, 3 * E1, E1)), torch.stack((2 * E1, E2, -E1)))
    assert distance.item() == pytest.approx(2, rel=1e-6)


def test_mean_squared_error_by_hand() -> None:
    """Squared errors (1, 4) and (0, 9): their mean over images and dimensions is 14 / 4."""
    z, t = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [3.0, 1.0]])
    assert feature_mse(z, t).item() == 3.5


def test_similarities_by_hand() -> None:
    """One image, temperatures 1, t = E1, a queue with E2. The teacher's cosines with (E1, E2) are (1, 0): with
    s = e / (e + 1), p_t = (s, 1 - s). The student z = E2 has the cosines (0, 1): log p_s = (log(1 - s), log s)."""
    s = math.e / (math.e + 1)
    expected = -(s * math.log(1 - s) + (1 - s) * math.log(s))
    one = {"student_temperature": 1.0, "teacher_temperature": 1.0}
    loss = similarity_distillation(3 * E2[None], 2 * E1[None], torch.stack((E2, 0 * E1)), **one)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("empty", [0, 3])
def test_similarities_are_their_equation(empty: int) -> None:
    """The dictionary of an image are the queue and the image's own teacher feature (SEED, section 3.2)."""
    z, t = draw(4, 6)
    queue = torch.nn.functional.normalize(draw(9, 6, seed=1)[0], dim=1)
    losses = []
    for student, teacher in zip(z, t, strict=True):
        entries = [teacher, *queue]
        p = slow_softmax([cosine(teacher, entry) / 0.2 for entry in entries])
        q = slow_softmax([cosine(student, entry) / 0.5 for entry in entries])
        losses.append(slow_cross_entropy(p, q))
    rows = torch.cat((queue[:5], torch.zeros(empty, 6, dtype=queue.dtype), queue[5:]))
    assert similarity_distillation(z, t, rows, **SHARP).item() == pytest.approx(sum(losses) / 4, rel=1e-12)


def test_similarities_with_an_empty_queue_are_0() -> None:
    z, t = draw(4, 6)
    loss = similarity_distillation(z.requires_grad_(), t, torch.zeros(5, 6), **SHARP)
    loss.backward()
    assert loss.item() == 0
    assert not z.grad.any()


def test_the_minimum_of_similarities_is_the_teachers_entropy() -> None:
    """At equal temperatures a student with the teacher's directions has its distribution, the minimum of a cross
    entropy."""
    z, t = draw(4, 6)
    queue = torch.nn.functional.normalize(draw(9, 6, seed=1)[0], dim=1)
    equal = {"student_temperature": 0.3, "teacher_temperature": 0.3}
    least = similarity_distillation(2 * t, t, queue, **equal)
    assert least < similarity_distillation(z, t, queue, **equal)
    z = t.clone().requires_grad_()
    similarity_distillation(z, t, queue, **equal).backward()
    assert z.grad.abs().max() < 1e-12


def test_gradients_flow_into_the_student_only() -> None:
    z, t, queue = (tensor.requires_grad_() for tensor in draw(4, 5, count=3))
    loss = teacher_distance(z, t) + feature_mse(z, t) + similarity_distillation(z, t, queue.detach(), **SHARP)
    assert_gradients(loss, into=[z], not_into=[t, queue])
