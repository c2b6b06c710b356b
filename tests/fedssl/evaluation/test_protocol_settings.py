"""Settings of protocols."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.evaluation.features import Features
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.linear_probe import LinearProbe
from fedssl.evaluation.protocol import CombinedProtocol, EvaluationInput, evaluate
from fedssl.evaluation.scores import units_of
from fedssl.methods.base import build_method
from tests.cases import some
from tests.fedssl.evaluation.made import Given, blobs, results

FOLDER = Path(__file__).resolve().parents[3] / "conf" / "evaluation"
TRANSFERS = ("transfer", "domains", "stl10", "table3", "four")  # they need data sets
TARGETS = ("multi_label", "regression", "segmentation")  # they need targets


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        pytest.param("none", set(), marks=pytest.mark.heavy),
        ("knn", {"knn"}),
        pytest.param(
            "semi_supervised",
            {f"linear_{n}_percent{ending}" for n in (1, 10) for ending in ("", "_std")},
            marks=pytest.mark.heavy,
        ),
        ("probes", {"knn", "linear", *(f"linear_{n}_per_class{ending}" for n in (2, 5) for ending in ("", "_std"))}),
    ],
)
def test_every_yaml_works_in_both_groups(name: str, keys: set[str]):
    component = compose([f"evaluation={name}"]).evaluation.protocol
    for slot in ("final_evaluation", "evaluation@final_evaluation"):
        assert compose([f"{slot}={name}"]).evaluation.final_protocol == component
    assert set(results(component.instantiate(), blobs(), seed=0)) == keys


def test_probes_merge_their_results():
    evaluation_input = Given(blobs())
    merged = CombinedProtocol(protocols={"a": KNN(), "b": LinearProbe()})(evaluation_input, seed=0)
    assert merged == {**KNN()(evaluation_input, seed=0), **LinearProbe()(evaluation_input, seed=0)}


class _NetworkRan(Exception):
    pass


FILES = [file.relative_to(FOLDER) for file in FOLDER.rglob("*.yaml")]
NAMES = sorted(str(file.with_suffix("")) for file in FILES if file.stem not in TRANSFERS + TARGETS)


@pytest.mark.parametrize("name", some(NAMES, default=set(NAMES) - {"fedu2/linear", "few_labels", "l_dawa/labels"}))
def test_declarations_are_those_of_a_run_of_the_protocol(name: str):
    """Images of 2 classes and an encoder: whether a network runs, whether features are used, and which results."""
    settings = compose([f"evaluation={name}", "encoder.width=2"])
    protocol, encoder = settings.evaluation.protocol.instantiate(), build_method(settings.model).encoder
    images = torch.randint(256, (60, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labeled, device = LabeledImages(TensorImages(images), torch.arange(60) % 2), torch.device("cpu")
    evaluation_input = EvaluationInput(
        encoder=encoder, train=labeled, test=labeled, mean=(0.5,), std=(0.5,), device=device
    )
    for part in [protocol, *getattr(protocol, "protocols", {}).values()]:
        vars(part).update({"epochs": 0} if hasattr(part, "epochs") else {})
        vars(part).update({"lr_schedule": None} if hasattr(part, "lr_schedule") else {})
    assert units_of(evaluate(protocol, evaluation_input, seed=0)) == protocol.result_units(2)
    features = replace(evaluation_input)
    vars(features)["features"] = Features(
        torch.zeros(60, 3), labeled.labels, torch.zeros(60, 3), labeled.labels, num_classes=2
    )
    end = register_module_forward_pre_hook(_network_ran)
    try:
        with pytest.raises(_NetworkRan) if protocol.trains_network else nullcontext():
            evaluate(protocol, features, seed=0)
    finally:
        end.remove()
    assert ("features" in vars(evaluation_input)) == protocol.uses_features


def _network_ran(network: nn.Module, inputs: object) -> None:
    raise _NetworkRan
