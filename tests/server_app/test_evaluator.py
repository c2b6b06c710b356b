"""Evaluation in a run: protocols of users, units from the progress line to the files, and validation."""

import collections
import copy
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedssl.config.component import Component
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.evaluation.protocol import CombinedProtocol, EvaluationProtocol
from fedssl.evaluation.scores import ACCURACY, Score
from fedssl.methods.base import build_method
from fedssl.report.accuracy_table import run_results, sweep_results
from fedssl.runs.run import read_run
from server_app.evaluator import Evaluator
from simulation.run import run
from tests.runs import read_lines, read_summary

TINY = ["dataset.limit=60", "encoder.width=4", "threads=1", "num_clients=2", "local_epochs=1", "rounds=1"]
HERE = "tests.server_app.test_evaluator"


class Plain(EvaluationProtocol):
    """A protocol that returns plain numbers."""

    uses_features = False

    def result_units(self, num_classes):
        return {"plain": ACCURACY}

    def __call__(self, subject, *, seed):
        return {"plain": 0.25, "plain_std": 0.05}


class Norm(EvaluationProtocol):
    """Mean length of a representation."""

    def result_units(self, num_classes):
        return {"norm": "cm"}

    def __call__(self, subject, *, seed):
        lengths = subject.features.test.norm(dim=1)
        return {"norm": Score(lengths.mean().item(), "cm", lengths.std().item())}


class Trains(EvaluationProtocol):
    """Trains a copy of the encoder and counts its calls."""

    calls = 0
    trains_network, uses_features = True, False

    def result_units(self, num_classes):
        return {"trained": ACCURACY}

    def validate(self, subject, *, feature_dim):
        super().validate(subject, feature_dim=feature_dim)
        if subject.num_classes > 10:
            raise InputError("too many classes")

    def __call__(self, subject, *, seed):
        if subject.encoder is None:
            return {}
        Trains.calls += 1
        encoder = copy.deepcopy(subject.encoder).train()
        nn.Linear(encoder.feature_dim, 2)(encoder(torch.rand(4, 1, 8, 8))).sum().backward()
        return {"trained": 0.5}


def evaluator(*overrides: str, protocol: str = "KNN", final: str = "KNN") -> tuple[Evaluator, object, object]:
    """With protocols of `fedssl.evaluation.knn` or of this module."""
    settings = compose([*TINY, *overrides])
    where = {"KNN": "fedssl.evaluation.knn"}
    components = [Component({"_target_": f"{where.get(name, HERE)}.{name}"}) for name in (protocol, final)]
    evaluation = replace(settings.evaluation, protocol=components[0], final_protocol=components[1])
    device = torch.device("cpu")
    made = Evaluator(evaluation, data=settings.data, rounds=3, device=device, seed=0)
    return made, build_method(settings.model), settings.data


def test_validation_runs_no_protocol(monkeypatch):
    monkeypatch.setattr(Trains, "calls", 0)
    made, method, _ = evaluator(protocol="Trains", final="Trains")
    before = copy.deepcopy(method.state_dict())
    made.validate(method.encoder)
    assert made.result_units() == {"trained": "accuracy"}
    assert made.trains_network
    assert Trains.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in method.state_dict().items())
    judged = {"global": {"trained": Score(0.5)}}
    assert made.evaluate([("global", method)]) == judged
    assert made.evaluate([("global", method)], final=True) == judged
    assert made.baselines(method) == {"untrained": {"trained": Score(0.5)}, "pixels": {}}


def test_a_class_that_is_no_protocol_is_refused():
    message = "Counter is no evaluation protocol; derive it from fedssl.evaluation.protocol"
    with pytest.raises(InputError, match=message):
        CombinedProtocol(protocols={"a": collections.Counter()})


def test_what_a_protocol_refuses_it_refuses_before_any_training(monkeypatch):
    made, method, _ = evaluator(final="Trains")
    monkeypatch.setattr("fedssl.evaluation.protocol.EvaluationInput.num_classes", 11)
    with pytest.raises(InputError, match="too many classes"):
        made.validate(method.encoder)


def test_features_beyond_memory_are_refused_before_training(monkeypatch):
    # 60 images of 64 pixels, 4 bytes each, twice: 30,720 bytes; representations of conv_small of width 4 are shorter.
    one, method, _ = evaluator()
    for free, refused in ((30_719, True), (30_720, False)):
        monkeypatch.setattr("fedssl.evaluation.protocol.available_memory", lambda free=free: free)
        with pytest.raises(InputError, match="60 training images") if refused else nullcontext():
            one.validate(method.encoder)


def test_units_from_the_protocol_to_the_files(tmp_path, capsys):
    overrides = ["evaluation=none", "final_evaluation=none", "evaluate_every=1"]
    for slot in ("evaluation", "final_evaluation"):
        overrides.append(f"+{slot}.protocols.b={{_target_:{HERE}.Norm}}")
        overrides.append(f"+{slot}.protocols.c={{_target_:{HERE}.Plain}}")
    run([*TINY, *overrides, f"output_dir={tmp_path}"])
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["units"] == {"norm": "cm", "plain": "accuracy"}
    assert set(line["evaluation"]) == {"norm", "norm_std", "plain", "plain_std"}
    summary = read_summary(tmp_path)
    assert summary["units"] == {"norm": "cm", "plain": "accuracy"}
    assert summary["test_images"] == {"norm": 359, "plain": 359}
    assert summary["final"]["federated"] == line["evaluation"]
    assert set(summary["final"]["pixels"]) == {"norm", "norm_std", "plain", "plain_std"}
    out = capsys.readouterr().out
    assert " cm  plain 25.0 ± 5.0%  " in out
    assert "\naccuracy in %" in out
    assert "\nnorm (cm)" in out
    header = sweep_results([tmp_path]).table().text().split("\n")[0]
    assert header.split() == ["norm", "(cm)", "plain", "(%)", "runs", "failed"]


@pytest.mark.heavy
def test_test_images_change_nothing_but_what_is_evaluated(tmp_path):
    """Runs with other test images train, calibrate and look at health alike, to the last bit."""
    overrides = [*TINY, "calibration=auxiliary", "calibration.share=0.5", "evaluate_every=1", "evaluation.k=5"]
    overrides += ["final_evaluation=dec_ssl/linear", "final_evaluation.epochs=2"]
    overrides += ["device=cpu", "measure_resources=false"]
    folders = [tmp_path / str(number) for number in (20, 60)]
    for folder in folders:
        run([*overrides, f"dataset.test_limit={folder.name}", f"output_dir={folder}"])
    first, second = (torch.load(folder / "encoder.pt", weights_only=True)["weights"] for folder in folders)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    health = [read_lines(folder / "health.jsonl") for folder in folders]
    shown = [[row.pop("spectrum") for row in rows] for rows in health]  # of test images
    assert health[0] == health[1]
    assert shown[0] != shown[1]
    results = run_results([read_run(folder) for folder in folders])
    assert list(results.units) == ["linear_dec_ssl"]
    assert "linear_dec_ssl (%)" in results.table().text()
