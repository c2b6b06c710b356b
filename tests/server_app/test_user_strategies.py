"""Values that hooks of a user's classes return: the error names the hook and a remedy."""

import sys

import numpy as np
import pytest
import torch

from fedssl.encoders.base import Encoder
from fedssl.encoders.factory import ConvSmall, conv_small
from fedssl.errors import InputError, RunError
from fedssl.methods.simclr import SimCLR
from fedssl.regularizers.base import Regularizer
from simulation.run import run
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from tests.federation import Federation
from tests.runs import SMALL, read_lines


@pytest.mark.parametrize(
    ("hook", "returned", "sentence"),
    [
        (
            "candidate_models",
            "even",
            r"candidate_models \(or starting_model\) of ServerStrategy returns 'even'; return",
        ),
        ("starting_model", 0, r"candidate_models \(or starting_model\) of ServerStrategy returns \(0,\); return a tup"),
        ("destination_models", "global", "destination_models of ServerStrategy returns 'global'; return a tuple"),
        ("upload_names", ("nothing",), "upload_names of ServerStrategy returns nothing; return some of the layers enc"),
        ("download_names", {"nothing": 1}, "download_names of ServerStrategy returns nothing; return some of the lay"),
        ("after_aggregation", None, "after_aggregation of ServerStrategy returns a NoneType; return a tuple of two"),
        ("on_round_end", {}, "on_round_end of ServerStrategy returns a dict; return a tuple of two values"),
    ],
)
def test_a_hook_returns_what_it_should(hook, returned, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerStrategy, hook, lambda *arguments: returned)
    with pytest.raises(InputError, match=f"^{sentence}"):
        Federation(tmp_path, "strategy=fedavg").run(1)


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (lambda layers: {name: array.astype(np.float64) for name, array in layers.items()}, "of float64 and shape"),
        (lambda layers: None, "server_step of ServerStrategy returns a NoneType; return layers"),
        (lambda layers: {"other": next(iter(layers.values()))}, "server_step of .* returns other of float32"),
        (lambda layers: {name: array[None] for name, array in layers.items()}, r"shape \(1,"),
    ],
)
def test_a_server_step_keeps_the_form_of_layers(change, form, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerStrategy, "has_server_step", True)
    monkeypatch.setattr(ServerStrategy, "server_step", lambda self, done: (change(done.layers), {}))
    with pytest.raises(InputError, match=f"{form}($|.*; return layers of the model in their dtypes and shapes)"):
        Federation(tmp_path, "strategy=fedavg").run(1)


def test_hooks_may_return_lists(tmp_path, monkeypatch):
    plain = Federation(tmp_path / "a", "strategy=fedavg").run(2)
    monkeypatch.setattr(ServerStrategy, "destination_models", lambda *arguments: ["global"])
    monkeypatch.setattr(ServerStrategy, "upload_names", lambda self, model, round, layers: layers.keys())
    monkeypatch.setattr(ServerStrategy, "after_aggregation", lambda self, done: [done.model.strategy_state, {}])
    layers = Federation(tmp_path / "b", "strategy=fedavg").run(2)
    assert {name: array.tobytes() for name, array in layers.items()} == {
        name: array.tobytes() for name, array in plain.items()
    }


@pytest.mark.parametrize("returned", [({"calls": 1}, {}), ({"scale": float("nan")}, {})])
def test_an_undeclared_state_ends_the_first_round(returned, tmp_path, monkeypatch):
    """Else its checkpoints would be refused when the run is resumed."""
    monkeypatch.setattr(ServerStrategy, "after_aggregation", lambda *arguments: returned)
    with pytest.raises(RunError, match="from the state after round 1: the state of the strategy has an invalid .*type"):
        run([*SMALL, "strategy=fedavg", "rounds=2", "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ((1.0,), "tuple"),
        (None, "NoneType"),
        (torch.ones(2, requires_grad=True), r"a tensor of shape \(2,\)"),
        (torch.ones(()), r"a tensor of shape \(\) without a gradient"),
    ],
)
@pytest.mark.parametrize(("owner", "hook"), [(SimCLR, "loss"), (Regularizer, "apply")])
def test_a_loss_is_a_scalar_with_a_gradient(owner, hook, returned, found, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, hook, lambda *arguments: returned)
    sentence = f"it failed: the loss of {owner.__name__} is {found}; return a scalar tensor with a gradient"
    with pytest.raises(RunError, match=sentence):
        run([*SMALL, "strategy=fedavg", "rounds=1", "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])


def test_an_exit_of_a_client_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(SimCLR, "loss", lambda *arguments: sys.exit(3))
    with pytest.raises(RunError, match="it failed: SystemExit: 3;?"):
        run([*SMALL, "strategy=fedavg", "rounds=1", "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])


class NoSides(FedSSLStrategy):
    def __init__(self, **arguments) -> None:
        pass


class NoAggregator(ServerStrategy):
    def __init__(self) -> None:
        pass


def without_aggregator(**arguments) -> FedSSLStrategy:
    return FedSSLStrategy(NoAggregator())


class NoStages(Encoder):
    feature_dim = 4


def no_stages(**arguments) -> Encoder:
    return NoStages()


class Wide(ConvSmall):
    """An encoder whose representations are not as long as it declares, or whose second stage is too wide."""


def wide(*, feature_dim=7, **arguments) -> Encoder:
    encoder = conv_small(**arguments)
    encoder.__class__, encoder.feature_dim = Wide, feature_dim
    return encoder


def unfit(**arguments) -> Encoder:
    encoder = wide(**arguments)
    encoder.blocks[1] = torch.nn.Conv2d(1, 1, 1)
    return encoder


@pytest.mark.parametrize(
    ("group", "target", "sentence"),
    [
        ("strategy", "NoSides", r"NoSides has no server of class ServerStrategy; call super\(\).__init__\(server, cli"),
        ("strategy", "without_aggregator", r"NoAggregator has no aggregator; call super\(\).__init__\(make_aggregat"),
        ("strategy", "no_stages", "no_stages makes a NoStages; return a strategies.base.FedSSLStrategy or"),
        ("encoder", "no_stages", "no_stages has no stages or no feature_dim; call define_stages and set feature_dim"),
        ("encoder", "wide", r"Wide returns the shape .2, 8. for 2 images; return .2, feature_dim=7."),
        ("encoder", "unfit", r"Wide fails on images of shape .1, 8, 8.: .*channels.*; correct its stages"),
        ("regularizer", "no_stages", "no_stages makes a NoStages; return a fedssl.regularizers.base.Regularizer or a"),
    ],
)
def test_an_unfinished_class_is_refused(group, target, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        run([*SMALL, f"{group}._target_={__name__}.{target}", f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("metric", "stored"),
    [(np.float32(0.5), 0.5), (torch.tensor(0.5), 0.5), (np.arange(2), [0, 1]), ({1: (2, np.nan)}, {"1": [2, None]})],
)
def test_metrics_may_be_numbers_of_libraries(metric, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerStrategy, "on_round_end", lambda self, state, outcome: ({}, {"mine": metric}))
    folder = tmp_path / "run"
    run([*SMALL, "strategy=fedavg", "rounds=1", "final_evaluation=none", f"output_dir={folder}"])
    assert read_lines(folder / "metrics.jsonl")[-1]["strategy_metrics"]["mine"] == stored


@pytest.mark.parametrize("metrics", [{"mine": object()}, {"mine": {1, 2}}, 3])
def test_other_metrics_are_refused(metrics, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerStrategy, "on_round_end", lambda self, state, outcome: ({}, metrics))
    with pytest.raises(InputError, match="on_round_end of ServerStrategy returns the metrics .*; return a dictionary"):
        Federation(tmp_path, "strategy=fedavg").run(1)


def test_client_states_are_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(ClientStrategy, "finish_training", lambda self, *a, **b: ({"mine": np.ones(2)}, {}))
    with pytest.raises(RunError, match="it failed: the client state mine of ClientStrategy is a ndarray; return tens"):
        run([*SMALL, "strategy=fedavg", "rounds=1", "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])
