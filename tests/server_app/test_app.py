"""Flower's run config: flat keys and ``overrides`` become words of the command line."""

import io
import json
import logging
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from client_app import handlers
from fedssl.config.load import compose
from fedssl.errors import InputError
from server_app.app import RUN_CONFIG_KEYS, app, overrides_of, without_traceback
from simulation.grid import LocalGrid
from tests.cases import some
from tests.flower import check_run_of_two_nodes

ROOT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def test_flower_knows_every_key_and_no_other():
    assert dict.fromkeys([*RUN_CONFIG_KEYS, "overrides"], "") == DECLARED


def test_flower_logs_a_wrong_value_in_one_sentence(capsys, monkeypatch):
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={"num-server-rounds": -3})
    flower, text = logging.getLogger("flwr"), io.StringIO()
    monkeypatch.setattr(flower, "disabled", False)  # libraries that configure logging disable the loggers of others
    flower.setLevel(logging.INFO)
    handler = logging.StreamHandler(text)
    flower.addHandler(handler)
    try:
        with pytest.raises(InputError) as caught:
            app(grid=None, context=context)
        flower.error("%s raised an exception", "Simulation", exc_info=caught.value)
    finally:
        flower.removeHandler(handler)
        flower.removeFilter(without_traceback)
    sentence = "rounds=-3 must be an integer of at least 1; the default is 20"
    assert text.getvalue() == f"Simulation raised an exception: {sentence}\n"
    assert json.loads(capsys.readouterr().out)["error"] == sentence


def test_flat_keys_are_settings():
    run_config = DECLARED | {"num-server-rounds": 7, "strategy": "fedavg", "partition-alpha": 0.25, "seed": 0}
    run_config |= {"dataset-path": "/my data/it's here", "dataset": "folder"}
    settings = compose(overrides_of(run_config))
    assert (settings.rounds, settings.seed, settings.algorithm.strategy.name) == (7, 0, "FedAvg")
    assert settings.partition.rule.values["alpha"] == 0.25
    assert settings.data.reader.values["path"] == "/my data/it's here"
    with pytest.raises(InputError, match='overrides has "it\'s", which cannot be split into words'):
        overrides_of({"overrides": "it's"})


@pytest.mark.parametrize("key", some(RUN_CONFIG_KEYS, default=("dataset-path", "partition-alpha", "resume", "seed")))
def test_every_key_stands_for_a_setting(key):
    example = {"experiment": "fedu2/base", "partition-alpha": 1.0, "optimizer-lr": 0.1, "output-dir": "/there"}
    example |= {"strategy": "fedavg", "method": "byol", "regularizer": "fur", "schedule": "layer_wise"}
    example |= {"encoder": "resnet18", "dataset": "digits", "partition": "iid", "precision": "bf16", "device": "cpu"}
    overrides = overrides_of({key: example.get(key, "/a/b" if key in ("dataset-path", "resume") else 10)})
    compose([*overrides, "dataset=cifar10"] if key == "dataset-path" else overrides)


def test_without_options_the_federation_sets_the_number_of_clients(tmp_path, capsys):
    """The nodes are a simulation's; test_flwr_run.py has the same run on Flower's runtime."""
    words = "dataset.limit=60 encoder.width=4 threads=1 evaluation=none final_evaluation=none collapse_images=0"
    run_config = {"num-server-rounds": 1, "local-epochs": 1, "strategy": "fedavg", "partition-alpha": 0.5}
    run_config |= {"output-dir": str(tmp_path / "run"), "overrides": f"{words} measure_resources=false"}
    node = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=DECLARED | run_config)
    app(LocalGrid(handlers.handle, num_clients=2), node)
    check_run_of_two_nodes(tmp_path / "run", capsys.readouterr().out)
