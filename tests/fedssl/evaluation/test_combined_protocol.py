"""Protocols together: names of their results, and images without a label."""

import logging
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from fedssl.config.load import compose
from fedssl.config.settings import DataSettings
from fedssl.datasets.base import ImageData, Split
from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.evaluation.features import accuracy
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.linear_probe import LinearProbe
from fedssl.evaluation.multi_label import MultiLabel
from fedssl.evaluation.protocol import (
    CombinedProtocol,
    EvaluationInput,
    EvaluationProtocol,
    evaluate,
    evaluate_domains,
    make_evaluation_input,
)
from fedssl.evaluation.regression import Regression
from fedssl.evaluation.retrieval import Retrieval
from fedssl.evaluation.scores import Score, num_test_images
from fedssl.evaluation.segmentation import Segmentation
from tests.fedssl.datasets.made import settings_of

CPU = torch.device("cpu")
NONE = NO_LABEL


class Brightness(EvaluationProtocol):
    """Mean of the features of the test images, with or without a label."""

    needs_labels = False

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"brightness": ""}

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        return {"brightness": Score(evaluation_input.features.test.mean().item(), "")}


class Trained(EvaluationProtocol):
    """Predicts class 0 for every test image, after a training that is counted."""

    trainings = 0

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"trained": "accuracy"}

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> Mapping[str, float]:
        predictions = evaluation_input.predict_once((self, seed), self._train)
        return {"trained": accuracy(predictions, evaluation_input.test.labels)}

    def _train(self, evaluation_input: EvaluationInput) -> Tensor:
        self.trainings += 1
        assert (evaluation_input.train.labels != NO_LABEL).all()
        return torch.zeros(len(evaluation_input.test.labels), dtype=torch.int64)


def loaded(
    monkeypatch: pytest.MonkeyPatch,
    protocol: EvaluationProtocol,
    train: list[int],
    test: list[int],
    *,
    encoder: nn.Module | None = None,
    owners: list[int] | None = None,
) -> EvaluationInput:
    """Load images as the protocol needs them, with these labels; the pixels of test image i are 0.2 i."""

    def load_split(data: DataSettings, split: Split) -> ImageData:
        labels = torch.tensor(train if split == "train" else test)
        images = (51 * torch.arange(len(labels)) % 256).byte().view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
        known = labels if (labels != NO_LABEL).any() else None
        of = torch.tensor(owners) if owners and split == "test" else None
        return ImageData(TensorImages(images.contiguous()), known, owners=of, owner_names=("a", "b", "c"))

    monkeypatch.setattr("fedssl.evaluation.protocol.load_split", load_split)
    data = settings_of("digits")
    made = make_evaluation_input(encoder, data, device=CPU, needs_labels=protocol.needs_labels)
    assert made is not None
    return made


def test_images_without_a_label_are_evaluated_beside_labeled_ones(monkeypatch: pytest.MonkeyPatch):
    # All test images have the mean (0 + 0.2 + 0.4 + 0.6) / 4 = 0.3, and the labeled ones 0 and 2 (0 + 0.4) / 2 = 0.2.
    together = CombinedProtocol(protocols={"a": KNN(k=1), "b": Brightness()})
    subject = loaded(monkeypatch, together, [NONE, 1, 0], [1, NONE, 0, NONE])
    results = evaluate(together, subject, seed=0)
    assert results["brightness"].value == pytest.approx(0.3)
    assert num_test_images([results]) == {"knn": 2, "brightness": 4}


def test_results_with_labels_are_bits_of_their_protocols_alone(monkeypatch: pytest.MonkeyPatch):
    labels = torch.randint(-1, 3, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = labels[:400], labels[400:]
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(2, 7), nn.GELU(), nn.Linear(7, 5))
    parts = {"a": KNN(k=5), "b": Brightness(), "c": LinearProbe(max_iterations=5)}
    together = CombinedProtocol(protocols=parts)
    found = evaluate(together, loaded(monkeypatch, together, train, test, encoder=encoder), seed=0)
    for protocol in parts.values():
        alone = evaluate(protocol, loaded(monkeypatch, protocol, train, test, encoder=encoder), seed=0)
        assert alone.items() <= found.items()
        assert num_test_images([alone]).items() <= num_test_images([found]).items()


def test_domains_have_the_results_of_one_training(monkeypatch: pytest.MonkeyPatch):
    # Of the labeled test images 0, 2 and 3, with classes 0, 1 and 0, class 0 is right for two. Domain a has 0 and 2, c
    # has 3, and b has only image 1 without a label.
    trained = Trained()
    together = CombinedProtocol(protocols={"a": trained, "b": Brightness()})
    subject = loaded(monkeypatch, together, [0, NONE, 1], [0, NONE, 1, 0], owners=[0, 1, 0, 2])
    values = {name: score.value for name, score in evaluate_domains(together, subject, seed=0).items()}
    of_pixels = {"brightness": 0.3, "brightness_a": 0.2, "brightness_b": 0.2, "brightness_c": 0.6}
    assert values == pytest.approx({"trained": 2 / 3, "trained_a": 1 / 2, "trained_c": 1, **of_pixels})
    assert trained.trainings == 1


@pytest.mark.parametrize(
    ("train", "test", "reason"),
    [
        ([NONE, NONE], [0, 1], "no training image has a label"),
        ([0, 1], [NONE, NONE], "no test image has a label"),
        ([2, NONE], [2, NONE], "all labeled images of the data set are of the class 2"),
    ],
)
def test_too_few_labels_leave_out_only_their_results(
    monkeypatch: pytest.MonkeyPatch, train: list[int], test: list[int], reason: str
):
    together = CombinedProtocol(protocols={"a": KNN(), "b": Brightness()})
    subject = loaded(monkeypatch, together, train, test)
    together.validate(subject, feature_dim=2)
    assert together.left_out(subject) == {"knn": reason}
    assert evaluate(together, subject, seed=0).keys() == {"brightness"}


def test_unknown_classes_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    together = CombinedProtocol(protocols={"a": Brightness(), "b": KNN(), "c": LinearProbe()})
    subject = loaded(monkeypatch, together, [0, 1, NONE], [0, 1, 2, NONE])
    with caplog.at_level(logging.WARNING):
        together.validate(subject, feature_dim=2)
    assert caplog.messages == [
        "1 of 3 test images count as errors, because no labeled training image has their class (2)"
    ]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (KNN(k=20), KNN(k=200), "knn"),
        (Regression(columns=["age"]), Regression(columns=["weight"]), "regression_r2, regression_mae, "),
        (MultiLabel(columns=["a"]), MultiLabel(columns=["b"]), "multi_label_map"),
        (Segmentation(masks="a"), Segmentation(masks="b"), "segmentation_miou, segmentation_pixel_accuracy"),
        (Retrieval(recall_at=[1]), Retrieval(recall_at=[5], gallery="train"), "retrieval_map"),
        (KNN(), CombinedProtocol(protocols={"inner": KNN()}), "knn"),
    ],
)
def test_results_of_the_same_name_are_refused(first: EvaluationProtocol, second: EvaluationProtocol, names: str):
    message = f"protocols.a and protocols.b both have the results {names}.*; remove protocols.b and evaluate it alone"
    with pytest.raises(InputError, match=message):
        CombinedProtocol(protocols={"a": first, "other": Brightness(), "b": second})


def test_another_name_gives_results_of_their_own():
    overrides = ["evaluation=none", "+evaluation@evaluation.protocols.a=fine_tune"]
    overrides += ["+evaluation@evaluation.protocols.b=fine_tune", "evaluation.protocols.b.shares=[0.1]"]
    with pytest.raises(
        InputError, match=r"the results fine_tune_10_percent, .*; set .* evaluation.protocols.b.name=NAME,"
    ):
        compose(overrides).evaluation.protocol.instantiate()
    named = compose([*overrides, "evaluation.protocols.b.name=slow"]).evaluation.protocol.instantiate()
    shares = [f"fine_tune_{share}_percent" for share in (1, 10, 100)]
    assert list(named.result_units(2)) == [*shares, "slow_10_percent"]
