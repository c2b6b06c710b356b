"""Evaluation inputs and protocols: features are computed once for all protocols."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedssl.config.settings import DataSettings
from fedssl.datasets.base import ImageData, Split
from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.evaluation.few_labels import FewLabels
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.linear_probe import LinearProbe
from fedssl.evaluation.protocol import (
    CombinedProtocol,
    EvaluationInput,
    EvaluationProtocol,
    evaluate,
    evaluate_domains,
    evaluation_problem,
    make_evaluation_input,
)
from fedssl.evaluation.scores import Score, units_of
from tests.fedssl.datasets.made import settings_of


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
    train, test = (LabeledImages(TensorImages(images[:n]), labels[:n]) for n in (4, 3))
    some = {"train": train, "test": test}
    return EvaluationInput(encoder=encoder, **some, mean=(0.5,), std=(0.1,), device=torch.device("cpu"))


def test_features_are_computed_once_for_all_protocols():
    encoder = Counting()
    probes = CombinedProtocol(protocols={"a": KNN(), "b": LinearProbe(), "c": FewLabels(labels_per_class=[1])})
    assert len(probes(evaluation_input(encoder), seed=0)) == 3
    assert encoder.seen == 4 + 3


def test_every_domain_of_the_test_has_its_results():
    """Of the test images 0, 1, 2, domain ``b`` has image 1, and ``a`` the others."""
    encoder = Counting()
    whole = evaluation_input(encoder)
    owned = replace(whole, test=replace(whole.test, labels=torch.tensor([0, 0, 0]), owners=torch.tensor([0, 2, 0])))
    owned = replace(owned, test=replace(owned.test, owner_names=("a", "no image", "b")))
    results = evaluate_domains(KNN(k=1), owned, seed=0)
    values = {name: score.value for name, score in results.items()}
    assert values == {"knn": pytest.approx(2 / 3), "knn_a": 1, "knn_b": 0}
    assert encoder.seen == 4 + 3
    assert evaluate_domains(KNN(k=1), whole, seed=0).keys() == {"knn"}
    many = replace(owned.test, owners=torch.arange(3))
    assert list(many.domains()) == ["a", "no image", "b"]


def loaded(monkeypatch: pytest.MonkeyPatch, train: list[int], test: list[int], classes: tuple[str, ...] = ()) -> None:
    """Let the splits of every data set have these labels."""

    def load_split(data: DataSettings, split: Split) -> ImageData:
        labels = torch.tensor(train if split == "train" else test)
        return ImageData(TensorImages(torch.zeros(len(labels), 1, 1, 2, dtype=torch.uint8)), labels, classes)

    monkeypatch.setattr("fedssl.evaluation.protocol.load_split", load_split)


def test_images_without_a_label_are_not_evaluated(monkeypatch: pytest.MonkeyPatch):
    loaded(monkeypatch, [0, NO_LABEL, 1, NO_LABEL], [1, 0, NO_LABEL])
    made = make_evaluation_input(None, settings_of("digits"), device=torch.device("cpu"))
    assert (made.train.labels.tolist(), made.test.labels.tolist()) == ([0, 1], [1, 0])
    assert (len(made.train.images), len(made.test.images)) == (2, 2)


def test_one_class_is_nothing_to_classify(monkeypatch: pytest.MonkeyPatch):
    data = settings_of("digits")
    loaded(monkeypatch, [1, NO_LABEL, 1], [1], ("images", "other"))
    assert make_evaluation_input(None, data, device=torch.device("cpu")) is None
    assert evaluation_problem(data) == (
        "all labeled images of the data set are of the class 'other', so that nothing can be classified; add images of "
        "other classes to dataset.path"
    )
    loaded(monkeypatch, [1, 1], [1, 0])  # anomaly detection: the defects are in the test only
    assert evaluation_problem(data) is None


def test_test_images_of_unknown_classes_count_as_errors(monkeypatch: pytest.MonkeyPatch, caplog):
    loaded(monkeypatch, [0, 1, 0], [0, 2, 3, 1, 2], ("a", "b", "c", "d"))
    made = make_evaluation_input(None, settings_of("digits"), device=torch.device("cpu"))
    KNN().validate(made, feature_dim=2)
    assert caplog.messages == [
        "3 of 5 test images count as errors, because no labeled training image has their class ('c', 'd')"
    ]
    caplog.clear()
    KNN().validate(replace(made, train=made.test, test=made.train), feature_dim=2)
    assert caplog.messages == ["no test image has the classes 'c', 'd', which results do not cover"]
    assert evaluate(KNN(), made, seed=0)["knn"].value <= 2 / 5
    assert evaluate(LinearProbe(), made, seed=0)["linear"].value <= 2 / 5
    assert evaluate(FewLabels(labels_per_class=[1], draws=1), made, seed=0)["linear_1_per_class"].value <= 2 / 5


class FineTuned(EvaluationProtocol):
    """A protocol that trains a copy of the encoder."""

    trains_network, uses_features = True, False

    def result_units(self, num_classes):
        return {"loss": "nats", "steps": "", "fine_tuned": "accuracy"}

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> Mapping[str, Score | float]:
        if evaluation_input.encoder is None:
            return {}
        network = copy.deepcopy(evaluation_input.encoder).train()
        loss = network(evaluation_input.train.images[:].float()).square().sum()
        loss.backward()
        return {
            "loss": Score(loss.item(), "nats"),
            "steps": Score(20, ""),
            "fine_tuned": min(1.0, network[1].weight.grad.norm().item()),
        }


class Undefined(FineTuned):
    """A protocol of somebody else, such as R2 of a single image."""

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> Mapping[str, Score | float]:
        return {"r2": math.nan, "error": Score(1.0, "m", std=math.inf), "knn": 0.5}


class Returning(FineTuned):
    def __init__(self, results):
        self.results = results

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> Mapping[str, Score | float]:
        return self.results


def test_results_that_are_not_finite_are_left_out(caplog: pytest.LogCaptureFixture):
    assert evaluate(Undefined(), evaluation_input(None), seed=0) == {"knn": Score(0.5)}
    assert caplog.messages == ["results that are NaN or infinite are left out: r2, error"]


@pytest.mark.parametrize("number", [torch.tensor(0.5), np.float32(0.5)], ids=["torch", "NumPy"])
def test_scores_are_plain_numbers(number):
    (score,) = evaluate(Returning({"knn": Score(number, std=number)}), evaluation_input(None), seed=0).values()
    assert (type(score.value), type(score.std), score.value) == (float, float, 0.5)


def test_an_accuracy_beyond_one_is_refused():
    with pytest.raises(InputError, match="^Returning returns knn=50; an accuracy is between 0 and 1"):
        evaluate(Returning({"knn": 50.0}), evaluation_input(None), seed=0)
    found = {"knn": 1.0000000000000002, "mae": Score(50.0, "m")}  # a mean whose weights were rounded
    assert evaluate(Returning(found), evaluation_input(None), seed=0).keys() == {"knn", "mae"}


def test_a_protocol_without_results_is_refused():
    with pytest.raises(InputError, match="^Returning returns {'knn': 'good'}; return a Score for each result"):
        evaluate(Returning({"knn": "good"}), evaluation_input(None), seed=0)
    with pytest.raises(InputError, match="^Returning returns a NoneType; return a dict with a Score for each result"):
        evaluate(Returning(None), evaluation_input(None), seed=0)


def test_a_protocol_may_train_the_encoder():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    before = copy.deepcopy(encoder.state_dict())
    result = evaluate(FineTuned(), evaluation_input(encoder), seed=0)
    assert result["fine_tuned"].value > 0
    assert units_of(result) == FineTuned().result_units(2)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert evaluate(FineTuned(), evaluation_input(None), seed=0) == {}
