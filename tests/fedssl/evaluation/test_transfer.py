"""Protocols on other data sets than the run's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.config.load import compose
from fedssl.datasets import base
from fedssl.errors import InputError
from fedssl.evaluation.features import pixels
from fedssl.evaluation.protocol import EvaluationProtocol, evaluate, evaluate_domains, make_evaluation_input
from fedssl.evaluation.scores import Score
from fedssl.evaluation.transfer import Transfer
from fedssl.methods.base import build_method
from server_app.evaluator import Evaluator

OTHER = ["evaluation=transfer", "+dataset@evaluation.datasets.few=digits", "evaluation.datasets.few.limit=120"]
CPU = torch.device("cpu")


def test_results_are_those_of_the_protocol_on_other_images():
    settings = compose([*OTHER, "evaluation@evaluation.protocol=knn", "+dataset@evaluation.datasets.all=digits"])
    encoder = build_method(settings.model).encoder
    evaluation_input = make_evaluation_input(encoder, settings.data, device=CPU)
    result = evaluate(settings.evaluation.protocol.instantiate(), evaluation_input, seed=0)
    knn = compose(["evaluation=knn"]).evaluation.protocol.instantiate()
    few = make_evaluation_input(encoder, compose(["dataset.limit=120"]).data, device=CPU)
    found = evaluate(knn, few, seed=0)["knn"], evaluate(knn, evaluation_input, seed=0)["knn"]
    assert result == dict(zip(("knn@few", "knn@all"), found, strict=True))
    assert result["knn@few"] != result["knn@all"]


def test_several_data_sets_are_read_once():
    more = [f"+dataset@evaluation.datasets.{name}=digits" for name in "abc"]
    more += [f"evaluation.datasets.{name}.limit={40 + number}" for number, name in enumerate("abc")]
    settings = compose([*OTHER, *more, "evaluation@evaluation.protocol=knn"])
    evaluation_input = make_evaluation_input(build_method(settings.model).encoder, settings.data, device=CPU)
    protocol = settings.evaluation.protocol.instantiate()
    first = evaluate(protocol, evaluation_input, seed=0)
    count = base._read_split.cache_info().misses
    assert evaluate(protocol, evaluation_input, seed=0) == first
    assert base._read_split.cache_info().misses == count


class Brightness(EvaluationProtocol):
    """Mean of the pixels of the test images."""

    def result_units(self, num_classes):
        return {"brightness": ""}

    def __call__(self, evaluation_input, *, seed):
        return {"brightness": Score(pixels(evaluation_input.test.images).mean().item(), "")}


def test_units_are_those_of_the_results_of_domains(tmp_path):
    lines = ["image,label,site"]
    for number in range(40):
        Image.new("L", (8, 8), color=6 * number).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{number % 2},{number // 2 % 2}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    own = ["dataset=folder", f"dataset.path={tmp_path / 'list.csv'}", "dataset.owner=site", "dataset.channels=1"]
    settings = compose([*own, "dataset.size=8", "dataset.test_fraction=0.5", *OTHER, "evaluation.include_own=true"])
    evaluator = Evaluator(settings.evaluation, data=settings.data, rounds=1, device=CPU, seed=0)
    results = evaluator.evaluate([("global", build_method(settings.model))])["global"]
    assert evaluator.result_units().keys() == results.keys()
    assert {"linear_0", "linear_1", "linear@few"} <= results.keys()


def test_a_domain_has_no_results_on_other_data_sets():
    settings = compose([*OTHER, "evaluation.include_own=true"])
    whole = make_evaluation_input(None, settings.data, device=CPU)
    owners = torch.arange(len(whole.test.labels)) % 2
    owned = replace(whole, test=replace(whole.test, owners=owners, owner_names=("a", "b")))
    results = evaluate_domains(settings.evaluation.protocol.instantiate(), owned, seed=0)
    assert [name for name in results if "@" in name] == [f"{name}@few" for name in results if name in ("knn", "linear")]
    assert any(name.endswith("_a") for name in results)


@pytest.mark.parametrize(("window", "is_adopted"), [("null", True), ("[0,1023]", False)])
def test_images_are_scaled_as_in_training(tmp_path, window, is_adopted):
    for number in range(20):
        (folder := tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), 200 * number, np.uint16)).save(folder / f"{number}.png")
    images = {"path": tmp_path, "channels": 1, "size": 8, "cache": "null"}
    own = compose(["dataset=folder", "dataset.window=[0,4095]", *(f"dataset.{key}={images[key]}" for key in images)])
    images["window"] = window
    other = [f"evaluation.datasets.few.{key}={value}" for key, value in images.items()]
    settings = compose(["evaluation=transfer", "+dataset@evaluation.datasets.few=folder", *other])
    datasets = settings.evaluation.protocol.values["datasets"]
    transfer = Transfer(protocol={"_target_": f"{__name__}.Brightness"}, datasets=datasets, include_own=True)
    found = evaluate(transfer, make_evaluation_input(None, own.data, device=CPU), seed=0)
    assert (found["brightness"] == found["brightness@few"]) == is_adopted


def test_a_data_set_without_labeled_test_images_is_refused():
    values = dict(compose(OTHER).evaluation.protocol.values)
    node = dict(values["datasets"]["few"])
    node["splits"] = {"federated": "train", "train": "train", "test": None}
    transfer = Transfer(protocol=values["protocol"], datasets={"few": node})
    with pytest.raises(InputError, match="datasets.few: the data set has no labeled test images"):
        evaluate(transfer, make_evaluation_input(None, compose([]).data, device=CPU), seed=0)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["evaluation=transfer"], "evaluation=transfer or domains needs a data set: add"),
        ([*OTHER, "evaluation.datasets.few.channels=3"], "needs images with 1 channel.s. but datasets.few.channels=3"),
    ],
)
def test_invalid_settings_are_one_sentence(overrides, sentence):
    settings = compose(overrides)
    with pytest.raises(InputError, match=sentence):
        evaluate(
            settings.evaluation.protocol.instantiate(), make_evaluation_input(None, settings.data, device=CPU), seed=0
        )
