"""Flower's run config: flat keys and ``overrides`` become words of the command line."""

import tomllib
from pathlib import Path

import pytest

from fedssl.config.load import compose
from server_app.app import RUN_CONFIG_KEYS, overrides_of

ROOT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def test_flower_knows_every_key_and_no_other():
    assert dict.fromkeys([*RUN_CONFIG_KEYS, "overrides"], "") == DECLARED


def test_what_is_left_empty_is_not_said():
    assert overrides_of(DECLARED) == []


def test_flat_keys_are_settings():
    run_config = DECLARED | {"num-server-rounds": 7, "strategy": "fedavg", "partition-alpha": 0.25, "seed": 0}
    run_config |= {"dataset-path": "/my data/it's here", "dataset": "image_folder"}
    settings = compose(overrides_of(run_config))
    assert (settings.rounds, settings.seed, settings.algorithm.strategy.name) == (7, 0, "FedAvg")
    assert settings.partition.rule.values["alpha"] == 0.25
    assert settings.data.reader.values["path"] == "/my data/it's here"


def test_overrides_win():
    run_config = {"num-server-rounds": 7, "overrides": "rounds=3 strategy=fedavg"}
    assert overrides_of(run_config) == ["rounds=7", "rounds=3", "strategy=fedavg"]
    assert compose(overrides_of(run_config)).rounds == 3


@pytest.mark.parametrize("key", RUN_CONFIG_KEYS)
def test_every_key_stands_for_a_setting(key):
    example = {"experiment": "fedu2/base", "partition-alpha": 1.0, "optimizer-lr": 0.1, "output-dir": "/there"}
    example |= {"strategy": "fedavg", "method": "byol", "regularizer": "fur", "schedule": "layer_wise"}
    example |= {"encoder": "resnet18", "dataset": "digits", "partition": "iid", "precision": "bf16", "device": "cpu"}
    overrides = overrides_of({key: example.get(key, "/a/b" if key in ("dataset-path", "resume") else 10)})
    compose([*overrides, "dataset=cifar10"] if key == "dataset-path" else overrides)
