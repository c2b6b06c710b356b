"""No protocol learns from test images or their labels."""

import re
from dataclasses import replace

import pytest
import torch

from fedssl.config.component import Component
from fedssl.config.load import compose
from fedssl.config.overrides import CONF, config_groups
from fedssl.evaluation import classifier, few_labels, fine_tune, knn, linear_probe, sgd_linear_probe
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.protocol import evaluate, make_evaluation_input
from fedssl.methods.base import build_method
from tests.cases import some

SMALL = ["dataset.limit=80", "dataset.test_limit=60", "encoder.width=4"]
MODULES = (few_labels, fine_tune, knn, linear_probe, sgd_linear_probe)
QUICK = {"epochs": 4, "batch_size": 8, "draws": 1, "labels_per_class": [1], "shares": [1.0]}

# Other numbers for the same code as another protocol.
ALIKE = {"semi_supervised", "fedu/linear", "fedu2/linear", "l_dawa/labels", "fedu/fine_tune", "lw_fedssl/fine_tune"}
ALIKE |= {"dec_ssl/linear", "linear", "lw_fedssl/linear", "fine_tune"}


def alone():
    """Choices of a single protocol on the run's own data."""
    written = {name: (CONF / "evaluation" / f"{name}.yaml").read_text() for name in config_groups()["evaluation"]}
    inherit = {name for name, text in written.items() if re.search(r"^  - \w+$", text, flags=re.MULTILINE)}
    modules = [f"_target_: {module.__name__}." for module in MODULES]
    return [name for name, text in written.items() if name in inherit or any(one in text for one in modules)]


@pytest.fixture
def predictions(monkeypatch):
    """Predictions for the test images, one for each score."""
    result = []
    for module in (classifier, few_labels, knn, linear_probe):  # `classifier` for both that train one

        def noted(predicted, labels, *, real=module.accuracy):
            result.append(predicted)
            return real(predicted, labels)

        monkeypatch.setattr(module, "accuracy", noted)
    return result


def made(name):
    """The protocol of a settings file, with little training."""
    values = dict(compose([f"evaluation={name}"]).evaluation.protocol.values)
    quick = {key: value for key, value in QUICK.items() if values.get(key)}
    if "lr_schedule" in values and "warmup" in (values["lr_schedule"] or {}):
        quick["lr_schedule"] = {**values["lr_schedule"], "epochs": 4, "warmup": 1}
    if "lr" in values.get("optimizer", {}):  # so that so few steps lead somewhere
        quick["optimizer"] = {**values["optimizer"], "lr": 0.1}
    return Component({**values, **quick}).instantiate()


@pytest.fixture(scope="module")
def evaluation_input():
    settings = compose(SMALL)
    torch.manual_seed(0)
    result = make_evaluation_input(build_method(settings.model).encoder, settings.data, device=torch.device("cpu"))
    with torch.no_grad():  # statistics of batch norm, so that features differ
        for _ in range(20):
            result.encoder.train()((result.train.images[:].float() / 255 - result.mean[0]) / result.std[0])
    return result


@pytest.mark.parametrize("name", some(alone(), default={*alone()} - ALIKE))
def test_predictions_do_not_depend_on_labels_or_other_test_images(name, evaluation_input, predictions):
    test, protocol = evaluation_input.test, made(name)

    def evaluated(labels, rows=slice(None)):
        before = len(predictions)
        scores = evaluate(
            protocol, replace(evaluation_input, test=LabeledImages(test.images.subset(rows), labels[rows])), seed=0
        )
        return list(scores.values()), predictions[before:]

    _, result = evaluated(test.labels)
    assert len(result[0].unique()) > 1  # or all were the same whatever is learned
    scores, again = evaluated(
        result[0]
    )  # labels equal to the predictions: the score is 1 and the predictions are unchanged
    assert scores[0].value == 1
    _, fewer = evaluated(test.labels, rows=slice(20))
    for one, same, part in zip(result, again, fewer, strict=True):
        assert torch.equal(one, same)
        assert torch.equal(one[:20], part)
