"""Losses of assignments to prototypes against slow transcriptions of their equations and numbers computed by hand."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.losses import dino, masked_tokens, sinkhorn, swav
from tests.fedssl.losses.vectors import assert_gradients, draw, slow_cross_entropy, slow_softmax


def slow_sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> list[list[float]]:
    share = [[math.exp(float(s) / epsilon) for s in row] for row in scores]
    for _ in range(iterations):
        columns = [sum(column) for column in zip(*share, strict=True)]
        share = [[value / column for value, column in zip(row, columns, strict=True)] for row in share]
        share = [[value / sum(row) for value in row] for row in share]
    return share


def slow_swav(scores: list[Tensor], codes: list[Tensor], temperature: float) -> float:
    terms = []
    for i in range(len(codes)):
        for j in range(len(scores)):
            if i != j:
                for code, row in zip(codes[i].tolist(), scores[j].tolist(), strict=True):
                    terms.append(slow_cross_entropy(code, slow_softmax([s / temperature for s in row])))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_sinkhorn_is_its_equation(epsilon: float, iterations: int) -> None:
    (scores,) = draw(6, 4, count=1)
    codes = sinkhorn(scores, epsilon=epsilon, iterations=iterations)
    expected = torch.tensor(slow_sinkhorn(scores, epsilon, iterations), dtype=torch.float64)
    torch.testing.assert_close(codes, expected, rtol=1e-10, atol=1e-14)


def test_sinkhorn_by_hand() -> None:
    """exp(log 4) = 4, and 1 elsewhere. Columns divided by their sums 5 and 2: (4/5, 1/2) and (1/5, 1/2). Rows divided
    by 13/10 and 7/10: (8/13, 5/13) and (2/7, 5/7)."""
    scores = torch.tensor([[2 * math.log(4), 0.0], [0.0, 0.0]])
    expected = torch.tensor([[8 / 13, 5 / 13], [2 / 7, 5 / 7]])
    torch.testing.assert_close(sinkhorn(scores, epsilon=2, iterations=1), expected)


def test_codes_have_no_gradient_and_are_float32() -> None:
    scores = draw(6, 4)[0].requires_grad_()
    assert not sinkhorn(scores, epsilon=0.05, iterations=3).requires_grad
    half = sinkhorn(scores.half(), epsilon=0.05, iterations=3)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.sum(dim=1), torch.ones(6))


def test_sinkhorn_without_iterations_is_rejected() -> None:
    with pytest.raises(InputError, match="iterations=0 but rows are normalized in each iteration; pass at least 1"):
        sinkhorn(torch.zeros(2, 2), epsilon=0.05, iterations=0)


@pytest.mark.parametrize(("views", "global_views"), [(2, 2), (2, 1), (6, 2)])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_swav_is_its_equation(views: int, global_views: int, temperature: float) -> None:
    scores = draw(4, 5, count=views)
    codes = [sinkhorn(s, epsilon=0.3, iterations=3) for s in scores[:global_views]]
    loss = swav(scores, codes, temperature=temperature)
    assert loss.item() == pytest.approx(slow_swav(scores, codes, temperature), rel=1e-12)


def test_swav_by_hand() -> None:
    """One image, two prototypes. Codes (3/4, 1/4) of view 1 and (1, 0) of view 2; predictions (1/2, 1/2) of view 1 and
    (3/4, 1/4) of view 2. View 2 predicts the codes of view 1: -(3/4 log 3/4 + 1/4 log 1/4) = 0.562335; view 1 those of
    view 2: log 2. Mean: 0.627741."""
    scores = [torch.zeros(1, 2), torch.tensor([[0.5 * math.log(3), 0.0]])]
    codes = [torch.tensor([[0.75, 0.25]]), torch.tensor([[1.0, 0.0]])]
    assert swav(scores, codes, temperature=0.5).item() == pytest.approx(0.627741, abs=1e-6)


def test_swav_gradient_is_right_and_flows_into_scores_only() -> None:
    scores, codes = draw(2, 3, count=3), [draw(2, 3, seed=1)[0].softmax(dim=1).requires_grad_()]
    for view in scores:
        view.requires_grad_()
    fixed = [code.detach() for code in codes]
    assert torch.autograd.gradcheck(lambda *s: swav(s, fixed, temperature=0.5), scores)
    assert_gradients(swav(scores, codes, temperature=0.5), into=scores[1:], not_into=codes)
    assert not scores[0].grad.any()  # no other view has codes that this one predicts


def test_swav_of_one_view_is_rejected() -> None:
    with pytest.raises(InputError, match="1 target views and 1 predicted views; pass at least two"):
        swav([torch.zeros(2, 3)], [torch.zeros(2, 3)], temperature=0.1)


TEMPERATURES = {"student_temperature": 0.1, "teacher_temperature": 0.04}
# Logits of the distributions (3/4, 1/4), (1/2, 1/2) and (1/8, 7/8).
THREE_QUARTERS, HALF, EIGHTH = (torch.tensor([[math.log(odds), 0.0]]) for odds in (3, 1, 1 / 7))


def slow_entropy(student: Tensor, teacher: Tensor, center: Tensor, temperatures: dict[str, float]) -> float:
    p = slow_softmax([float(x) / temperatures["teacher_temperature"] for x in teacher - center])
    return slow_cross_entropy(p, slow_softmax([float(x) / temperatures["student_temperature"] for x in student]))


def slow_dino(student: list[Tensor], teacher: list[Tensor], center: Tensor, temperatures: dict[str, float]) -> float:
    terms = []
    for i in range(len(teacher)):
        for j in range(len(student)):
            if i != j:
                for t, s in zip(teacher[i], student[j], strict=True):
                    terms.append(slow_entropy(s, t, center, temperatures))
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("views", "global_views"), [(2, 2), (2, 1), (5, 2), (4, 3)])
def test_dino_is_its_equation(views: int, global_views: int) -> None:
    student, teacher = draw(3, 7, count=views), draw(3, 7, seed=1, count=global_views)
    (center,) = draw(7, seed=2, count=1)
    loss = dino(student, teacher, center=center, **TEMPERATURES)
    assert loss.item() == pytest.approx(slow_dino(student, teacher, center, TEMPERATURES), rel=1e-12)


def test_dino_by_hand() -> None:
    """One image, temperatures 1, K = 2, and a center that the teacher's logits contain. Teacher: (3/4, 1/4) and (1/2,
    1/2). Student: (1/2, 1/2), (3/4, 1/4) and of a local view (1/8, 7/8). The four pairs of different views:
    t1, s2: -(3/4 log 3/4 + 1/4 log 1/4) = 0.562335; t1, s3: -(3/4 log 1/8 + 1/4 log 7/8) = 1.592964;
    t2, s1: log 2 = 0.693147; t2, s3: -(log 1/8 + log 7/8) / 2 = 1.106486. Mean: 0.988733."""
    center = torch.tensor([5.0, -2.0])
    students, teachers = [HALF, THREE_QUARTERS, EIGHTH], [THREE_QUARTERS + center, HALF + center]
    loss = dino(students, teachers, center=center, student_temperature=1, teacher_temperature=1)
    assert loss.item() == pytest.approx(0.988733, abs=1e-6)


def test_dino_gradient_is_right_and_flows_into_the_student_only() -> None:
    student, teacher = draw(2, 3, count=3), draw(2, 3, seed=1)
    (center,) = draw(3, seed=2, count=1)
    tensors = [tensor.requires_grad_() for tensor in (*student, *teacher, center)]
    soft = {"student_temperature": 0.7, "teacher_temperature": 0.5}
    fixed = [t.detach() for t in teacher]
    assert torch.autograd.gradcheck(lambda *s: dino(s, fixed, center=center.detach(), **soft), tensors[:3])
    assert_gradients(dino(student, teacher, center=center, **soft), into=student, not_into=[*teacher, center])


@pytest.mark.parametrize(("views", "global_views"), [(1, 1), (1, 2), (2, 3)])
def test_dino_without_a_pair_is_rejected(views: int, global_views: int) -> None:
    student, teacher = draw(2, 3, count=views), draw(2, 3, count=global_views)
    with pytest.raises(InputError, match=f"{global_views} target views and {views} predicted views; pass at least two"):
        dino(student, teacher, center=torch.zeros(3), **TEMPERATURES)


def slow_masked_tokens(
    student: Tensor, teacher: Tensor, masked: Tensor, center: Tensor, temperatures: dict[str, float]
) -> float:
    total = 0.0
    for s, t, mask in zip(student, teacher, masked, strict=True):
        terms = [slow_entropy(s[n], t[n], center, temperatures) for n in range(len(mask)) if mask[n]]
        total += sum(terms) / len(terms) if terms else 0
    return total / len(masked)


def masked_loss(student: Tensor, teacher: Tensor, masked: Tensor, **settings) -> Tensor:
    """The loss of the masked patches of logits ``(batch, patches, K)``, and of another patch of weight 0."""
    weights = masked.double() / (len(masked) * masked.sum(dim=1, keepdim=True).clamp(min=1))
    used = masked.clone()
    used[1, 2] = True
    return masked_tokens(student[used], teacher[used], weights[used], **settings)


def some_masked() -> Tensor:
    return torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]).bool()


def test_masked_tokens_is_its_equation() -> None:
    student, teacher = draw(4, 4, 6)
    (center,) = draw(6, seed=2, count=1)
    loss = masked_loss(student, teacher, some_masked(), center=center, **TEMPERATURES)
    slow = slow_masked_tokens(student, teacher, some_masked(), center, TEMPERATURES)
    assert loss.item() == pytest.approx(slow, rel=1e-12)


def test_masked_tokens_by_hand() -> None:
    """Image 1 has two masked patches: (3/4, 1/4) predicted as such, 0.562335, and (1/2, 1/2) as such, log 2; their mean
    is 0.627741. Its third patch is not masked. Image 2 has none and counts as 0; the mean over images is 0.313871."""
    logits = torch.cat((THREE_QUARTERS, HALF, EIGHTH))
    teacher = torch.stack((logits, logits)) + 1
    student = torch.stack((torch.cat((THREE_QUARTERS, HALF, 9 * EIGHTH)), -logits))
    masked = torch.tensor([[True, True, False], [False, False, False]])
    one = {"student_temperature": 1, "teacher_temperature": 1}
    loss = masked_loss(student, teacher, masked, center=torch.ones(2), **one)
    assert loss.item() == pytest.approx(0.313871, abs=1e-6)


def test_masked_tokens_gradient_flows_into_the_students_masked_patches() -> None:
    student, teacher, center = (x.requires_grad_() for x in (*draw(4, 4, 3), draw(3)[0]))
    soft = {"student_temperature": 0.7, "teacher_temperature": 0.5}
    fixed = teacher.detach()
    assert torch.autograd.gradcheck(
        lambda s: masked_loss(s, fixed, some_masked(), center=center.detach(), **soft), student
    )
    loss = masked_loss(student, teacher, some_masked(), center=center, **soft)
    assert_gradients(loss, into=[student], not_into=[teacher, center])
    assert torch.equal(student.grad.any(dim=2), some_masked())
