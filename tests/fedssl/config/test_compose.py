"""Compositions without Hydra, for choices that set nothing outside their group, equal those of Hydra."""

import pickle
import random

import pytest
from omegaconf import OmegaConf

from fedssl.config import compose, load
from fedssl.config.overrides import config_groups
from fedssl.errors import InputError

CHOICES = [(f"{group}={name}",) for group, names in config_groups().items() for name in names]
RANDOM = random.Random(0)
CASES = [
    ("dataset=cifar10", "optimizer=adamw"),  # the default, digits, selects an augmentation
    ("regularizer=prox", "strategy=featarc"),  # featarc selects a regularizer
    ("strategy=fedavg", "strategy=featarc"),
    ("experiment=cifar_clusters", "partition=dirichlet", "method=byol"),
    ("final_evaluation=knn", "method=lw_fedssl/byol", "schedule=layer_wise"),
    ("calibration=auxiliary", "+dataset@calibration.dataset=digits", "strategy='fedavg'"),
]


def is_equal_to_hydras(overrides):
    expected, expected_choices = compose._hydra_composed(overrides)
    config, choices = pickle.loads(compose._composed(overrides))
    assert list(choices.items()) == list(expected_choices.items())
    assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(expected)  # in the same order
    assert OmegaConf.is_struct(config)
    assert config.encoder._get_flag("struct") == expected.encoder._get_flag("struct")


@pytest.mark.parametrize("overrides", CASES)
def test_a_composition_equals_hydras(overrides):
    is_equal_to_hydras(overrides)


@pytest.mark.heavy
@pytest.mark.parametrize("overrides", [*CHOICES, *(sum(RANDOM.sample(CHOICES, 3), ()) for _ in range(40))])
def test_the_composition_of_any_choices_equals_hydras(overrides):
    is_equal_to_hydras(overrides)


def test_most_choices_need_no_further_composition_by_hydra(monkeypatch):
    compose._composed(())
    monkeypatch.setattr(compose, "_hydra_composed", None)
    compose._composed(("strategy=fedu", "method=simsiam", "optimizer=adamw", "encoder=resnet18"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["privacy=central", "privacy.delta=0.1"], "privacy.delta=0.1 .* must be below 1 / num_clients; set .*=0.01"),
        (["privacy=central", "num_clients=100000"], "delta=1e-05 .* below 1 / num_clients; set privacy.delta=1e-06 or"),
        (["method=swav", "method.epsilon=1e-320"], "method.epsilon=1e-320 must be at least 0.0001"),
        (["method=lejepa", "method.num_slices=2000000000"], "method.num_slices=2000000000 must be at most 65,536"),
        (["method.temperature=1e-5"], "method.temperature=1e-05 must be at least 0.0001"),
        (["optimizer.lr=1e300"], "optimizer.lr=1e.300 must be a number whose size is from"),
        (["optimizer.weight_decay=1e-310"], "optimizer.weight_decay=1e-310 must be a number whose size is from 1e-30"),
        (["num_clients=2000000000"], "num_clients=2000000000 must be at most 10,000,000"),
    ],
)
def test_unusable_numbers_are_refused_before_a_run(overrides, sentence):
    with pytest.raises(InputError, match=f"^.*{sentence}"):
        load.compose(overrides)
