"""The protocol with few labels: its draws, and its accuracy by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedssl.evaluation.features import Features
from fedssl.evaluation.few_labels import FewLabels, center_and_scale
from fedssl.evaluation.protocol import evaluate
from fedssl.evaluation.sampling import sample_per_class
from fedssl.seeding import numpy_generator
from tests.fedssl.evaluation.made import Given, blobs, results


def test_sample_per_class_draws_equal_numbers():
    labels = torch.tensor([2, 0, 1, 0, 2, 1, 0, 0, 1, 2])
    drawn = sample_per_class(labels, per_class=3, generator=np.random.default_rng(0))
    assert labels[drawn].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(set(drawn.tolist())) == 9


def test_a_class_with_too_few_images_leaves_one_result_out():
    data = blobs(classes=3)
    data.train_labels[data.train_labels == 2] = torch.tensor([2] * 4 + [1] * 62)
    given = Given(data)
    named = replace(given.train, classes=("a", "b", "c"))
    object.__setattr__(given, "train", named)
    protocol = FewLabels(labels_per_class=[2, 5], shares=[0.5], draws=2)
    assert protocol.left_out(given) == {"linear_5_per_class": "class 'c' has 4 labeled training images"}
    assert list(evaluate(protocol, given, seed=0)) == ["linear_2_per_class", "linear_50_percent"]
    assert set(protocol.result_units(3)) == {"linear_2_per_class", "linear_5_per_class", "linear_50_percent"}


def test_center_and_scale_by_hand():
    # Centre (1, 2); squared distances 1 + 4 = 5 each, so the scale is sqrt(5).
    train, test = center_and_scale(torch.tensor([[0.0, 0.0], [2.0, 4.0]]), torch.tensor([[1.0, 7.0]]))
    torch.testing.assert_close(train, torch.tensor([[-1.0, -2.0], [1.0, 2.0]]) / math.sqrt(5))
    torch.testing.assert_close(test, torch.tensor([[0.0, 5.0]]) / math.sqrt(5))


def test_few_labels_by_hand():
    # One feature; class 0 is at 0 and 10, class 1 at 4. With one image per class the boundary is half-way:
    # at 2 if the image at 0 is drawn (the test images 0, 1, 4 are right, 10 is not: 3/4),
    # at 7 if the image at 10 is drawn (4 and 10 are right: 2/4).
    train, labels = torch.tensor([[0.0], [10.0], [4.0]]), torch.tensor([0, 0, 1])
    test, test_labels = torch.tensor([[0.0], [1.0], [4.0], [10.0]]), torch.tensor([0, 0, 1, 0])
    data = Features(train, labels, test, test_labels, num_classes=2)
    expected = []
    for draw in range(6):
        generator = numpy_generator(5, "few labels", 1, draw)
        first = sample_per_class(labels, per_class=1, generator=generator)[0].item()
        expected.append(0.75 if first == 0 else 0.5)
    assert len(set(expected)) == 2
    assert results(FewLabels(labels_per_class=[1], draws=6), data, seed=5) == {
        "linear_1_per_class": pytest.approx(np.mean(expected)),
        "linear_1_per_class_std": pytest.approx(np.std(expected, ddof=1)),
    }
    assert results(FewLabels(labels_per_class=[1], draws=1), data, seed=5) == {"linear_1_per_class": expected[0]}
