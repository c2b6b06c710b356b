"""Evaluation inputs and protocols: features are computed once for all protocols."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from fedssl.datasets.images import TensorImages
from fedssl.evaluation.few_labels import FewLabels
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.linear_probe import LinearProbe
from fedssl.evaluation.protocol import CombinedProtocol, EvaluationInput, EvaluationProtocol, LabeledImages, evaluate
from fedssl.evaluation.scores import Score, units_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(nn.Flatten):
    """Counts the images in its forward passes."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


def evaluation_input(encoder: nn.Module | None) -> EvaluationInput:
    """Images of 1 x 2 pixels; class 0 is bright on the left, class 1 on the right."""
    images = torch.tensor([[255, 0], [0, 255], [204, 51], [51, 204]], dtype=torch.uint8).view(4, 1, 1, 2)
    labels = torch.tensor([0, 1, 0, 1])
    some = {
        "train": LabeledImages(TensorImages(images), labels),
        "test": LabeledImages(TensorImages(images[:3]), labels[:3]),
    }
    return EvaluationInput(encoder=encoder, **some, mean=(0.5,), std=(0.1,), device=torch.device("cpu"))


def test_features_are_computed_once_for_all_protocols():
    encoder = Counting()
    probes = CombinedProtocol(protocols={"a": KNN(), "b": LinearProbe(), "c": FewLabels(labels_per_class=[1])})
    assert len(probes(evaluation_input(encoder), seed=0)) == 3
    assert encoder.seen == 4 + 3


def test_features_of_an_encoder_and_raw_pixels():
    # Pixel 51 -> 0.2 -> (0.2 - 0.5) / 0.1 = -3.
    features = evaluation_input(nn.Flatten()).features
    torch.testing.assert_close(features.train[2:], torch.tensor([[3.0, -3.0], [-3.0, 3.0]]))
    assert features.test.shape == (3, 2)
    assert features.num_classes == 2
    torch.testing.assert_close(evaluation_input(None).features.train[2:], torch.tensor([[0.8, 0.2], [0.2, 0.8]]))


class FineTuned(EvaluationProtocol):
    """A protocol that trains a copy of the encoder."""

    trains_network, uses_features = True, False

    def result_units(self, num_classes):
        return {"fine_tuned_loss": "nats", "steps": "", "fine_tuned": "accuracy"}

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> Mapping[str, Score | float]:
        if evaluation_input.encoder is None:
            return {}
        network = nn.Sequential(
            copy.deepcopy(evaluation_input.encoder), nn.LazyLinear(evaluation_input.num_classes)
        ).train()
        images = (evaluation_input.train.images[:].float() / 255 - evaluation_input.mean[0]) / evaluation_input.std[0]
        network(images)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images), evaluation_input.train.labels)
            loss.backward()
            optimizer.step()
        return {"fine_tuned_loss": Score(loss.item(), "nats"), "steps": Score(20, ""), "fine_tuned": 1.0}


def test_a_protocol_may_train_the_encoder():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    before = copy.deepcopy(encoder.state_dict())
    torch.manual_seed(0)
    result = evaluate(FineTuned(), evaluation_input(encoder), seed=0)
    assert result["fine_tuned_loss"].value < 0.1
    assert units_of(result) == {"fine_tuned_loss": "nats", "steps": "", "fine_tuned": "accuracy"}
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert evaluate(FineTuned(), evaluation_input(None), seed=0) == {}
