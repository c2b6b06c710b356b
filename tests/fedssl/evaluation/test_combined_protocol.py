"""Protocols together: names of their results."""

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.multi_label import MultiLabel
from fedssl.evaluation.protocol import (
    CombinedProtocol,
    EvaluationInput,
    EvaluationProtocol,
)
from fedssl.evaluation.regression import Regression
from fedssl.evaluation.retrieval import Retrieval
from fedssl.evaluation.scores import Score
from fedssl.evaluation.segmentation import Segmentation


class Brightness(EvaluationProtocol):
    """Mean of the features of the test images, with or without a label."""

    needs_labels = False

    def result_units(self, num_classes: int) -> dict[str, str]:
        return {"brightness": ""}

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        return {"brightness": Score(evaluation_input.features.test.mean().item(), "")}


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
