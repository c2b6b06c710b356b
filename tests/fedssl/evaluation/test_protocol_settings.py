"""Protocols as settings."""

import math
import re

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.evaluation.few_labels import FewLabels
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.linear_probe import LinearProbe
from fedssl.evaluation.protocol import CombinedProtocol
from tests.fedssl.evaluation.made import Given, blobs, results

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("slot", ["evaluation", "final_evaluation", "evaluation@final_evaluation"])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("none", set()),
        ("knn", {"knn"}),
        ("linear", {"linear"}),
        ("few_labels", {f"linear_{n}_per_class{ending}" for n in (2, 5) for ending in ("", "_std")}),
        ("semi_supervised", {f"linear_{n}_percent{ending}" for n in (1, 10) for ending in ("", "_std")}),
        (
            "probes",
            {"knn", "linear", *(f"linear_{n}_per_class{ending}" for n in (2, 5) for ending in ("", "_std"))},
        ),
    ],
)
def test_every_yaml_serves_in_both_places(slot: str, name: str, keys: set[str]):
    settings = compose([f"{slot}={name}"]).evaluation
    component = settings.protocol if slot == "evaluation" else settings.final_protocol
    assert set(results(component.instantiate(), blobs(), seed=0)) == keys


def test_probes_merge_their_results():
    subject = Given(blobs())
    merged = CombinedProtocol(protocols={"a": KNN(), "b": LinearProbe()})(subject, seed=0)
    assert merged == {**KNN()(subject, seed=0), **LinearProbe()(subject, seed=0)}


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        (KNN, {"k": 0}),
        (KNN, {"temperature": 0.0}),
        (KNN, {"temperature": -1.0}),
        (LinearProbe, {"l2": -1.0}),
        (LinearProbe, {"max_iterations": 0}),
        (FewLabels, {"labels_per_class": []}),
        (FewLabels, {"labels_per_class": [0, 5]}),
        (FewLabels, {"draws": 0}),
        (FewLabels, {"l2": math.nan}),
    ],
)
def test_bad_settings_are_refused_by_name(protocol: type, settings: dict[str, object]):
    (name, value) = next(iter(settings.items()))
    with pytest.raises(InputError, match=re.escape(f"{name}={value}")):
        protocol(**settings)
