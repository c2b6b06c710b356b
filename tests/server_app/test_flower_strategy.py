"""Our strategies under Flower's own loop: the same rounds as the ServerApp's."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import Strategy

import fedssl
from client_app.app import app as client_app
from fedssl.errors import InputError
from fedssl.wire.records import arrays_to_record, record_to_arrays
from server_app.flower_strategy import FlowerStrategy
from simulation.grid import LocalGrid
from strategies.types import ServerState
from tests.federation import TINY, Federation


@pytest.mark.parametrize("name", ["eua", pytest.param("local_only", marks=pytest.mark.heavy)])
def test_rounds_under_flowers_loop_have_the_same_bits(tmp_path, name):
    overrides = [f"strategy={name}", "method=byol", "num_clients=3", "clients_per_round=2"]
    ours, theirs = Federation(tmp_path / "a", *overrides), Federation(tmp_path / "b", *overrides)
    ours.run(2)
    strategy = FlowerStrategy(theirs.components.federation)
    assert isinstance(strategy, Strategy)
    result = strategy.start(grid=theirs.grid, initial_arrays=arrays_to_record(theirs.layers), num_rounds=2, timeout=60)
    assert strategy.state.round == 2
    assert strategy.state.model_names() == ours.state.model_names()
    for model in ours.state.model_names():
        for layer, array in ours.state.models[model].layers.items():
            assert np.array_equal(strategy.state.models[model].layers[layer], array), (model, layer)
    first = strategy.state.models[strategy.state.model_names()[0]].layers
    assert all(np.array_equal(record_to_arrays(result.arrays)[layer], array) for layer, array in first.items())
    assert [metrics["clients"] for metrics in result.train_metrics_clientapp.values()] == [2, 2]


@pytest.mark.heavy
def test_the_server_app_of_the_docs_runs_the_same_rounds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "extend.md"
    (code,) = re.findall(r"^```python\n(from flwr.serverapp .*?)^```", page.read_text(), flags=re.M | re.S)
    example = code + "    context.result = result\n"
    namespace = {}
    exec(compile(example, "extend.md", "exec"), namespace)
    ours, theirs = Federation(tmp_path / "a", "strategy=fedavg"), Federation(tmp_path / "b", "strategy=fedavg")
    ours.run(2)
    small = [word for word in TINY if not word.startswith("num_clients=")]
    monkeypatch.setattr(fedssl, "compose", partial(fedssl.compose, *small, output_dir=tmp_path / "c"))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    namespace["app"](grid=theirs.grid, context=context)
    layers = record_to_arrays(context.result.arrays)
    assert all(np.array_equal(layers[name], array) for name, array in ours.layers.items())


@pytest.mark.parametrize(
    "change",
    [
        "secure_aggregation=secagg_plus secure_aggregation=none",
        "aggregation.buffered=true aggregation.buffered=false",
        "aggregation.over_selection=1 aggregation.over_selection=0",
        "aggregation.round_deadline=9 aggregation.round_deadline=null",
        "aggregation.max_retries=1 aggregation.max_retries=0",
        "client_speed=lognormal client_speed=none",
    ],
)
def test_what_flowers_loop_cannot_do_is_refused(tmp_path, change):
    setting, remedy = change.split()
    federation = Federation(tmp_path / "a", "num_clients=5")
    small = [word for word in TINY if not word.startswith("num_clients=")]
    overrides = ["num_clients=5", "clients_per_round=4", "measure_resources=true", f"output_dir={tmp_path / 'b'}"]
    if "secure" in setting:
        overrides += ["strategy.weighting=uniform"]
    composed = fedssl.compose(*small, *overrides, setting)
    with pytest.raises(InputError, match=f"waits for all replies.* set .*{remedy}"):
        composed.server(federation.grid)


def test_statistics_of_the_clients_images_are_measured(tmp_path):
    composed = fedssl.compose(*TINY, "dataset.mean=federated", output_dir=tmp_path)
    strategy = composed.server(LocalGrid(client_app, num_clients=3)).strategy
    data = strategy._federation.settings.data
    assert 0.1 < data.mean[0] < 0.6
    assert 0.1 < data.std[0] < 0.6


def test_no_round_follows_the_last_one(tmp_path):
    federation = Federation(tmp_path, "rounds=1")
    strategy = FlowerStrategy(federation.components.federation, ServerState(round=1))
    with pytest.raises(InputError, match="the run has 1 rounds"):
        strategy.configure_train(2, arrays_to_record(federation.layers), None, federation.grid)
