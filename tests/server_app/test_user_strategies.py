"""Values that hooks of a user's classes return: the error names the hook and a remedy."""

import numpy as np
import pytest
import torch

from fedssl.errors import InputError, RunError
from fedssl.methods.simclr import SimCLR
from fedssl.regularizers.base import Regularizer
from simulation.run import run
from strategies.base import ServerStrategy
from tests.federation import Federation
from tests.runs import SMALL


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
        (lambda layers: {"other": next(iter(layers.values()))}, "server_step of .* returns other of float32"),
        (lambda layers: {name: array[None] for name, array in layers.items()}, r"shape \(1,"),
    ],
)
def test_a_server_step_keeps_the_form_of_layers(change, form, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerStrategy, "has_server_step", True)
    monkeypatch.setattr(ServerStrategy, "server_step", lambda self, done: (change(done.layers), {}))
    with pytest.raises(InputError, match=f"{form}.*; return layers of the model in their dtypes and shapes"):
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
    sentence = f"it failed: the loss of SimCLR is {found}; return a scalar tensor with a gradient"
    with pytest.raises(RunError, match=sentence):
        run([*SMALL, "strategy=fedavg", "rounds=1", "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])
