"""Compositions without Hydra, for choices that set nothing outside their group, equal those of Hydra."""

import pickle
import random

import pytest
from omegaconf import OmegaConf

from fedssl.config import compose
from fedssl.config.overrides import config_groups
from fedssl.errors import InputError

# An experiment is always composed by Hydra, with all choices beside it.
GROUPS = {group: names for group, names in config_groups().items() if group != "experiment"}
CHOICES = [f"{group}={name}" for group, names in GROUPS.items() for name in random.Random(0).sample(names, len(names))]
TRIPLES = -(-len(CHOICES) // 3)  # more than a group has choices
CASES = [
    ("dataset=cifar10", "optimizer=adamw"),  # the default, digits, selects an augmentation
    ("regularizer=prox", "strategy=featarc"),  # featarc selects a regularizer
    ("strategy=fedavg", "strategy=featarc"),
    ("strategy=fedavg", "strategy=fedu", "final_evaluation=knn", "dataset=cifar10", "final_evaluation=none"),
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
@pytest.mark.parametrize("first", range(TRIPLES))
def test_the_composition_of_any_choices_equals_hydras(first):
    """Each choice once, with two of other groups."""
    is_equal_to_hydras(tuple(CHOICES[first::TRIPLES]))


def test_choices_within_their_group_need_no_further_composition(monkeypatch):
    """Digits, the default, has selected an augmentation; the others replace a choice that has set nothing else."""
    compose._composed(())
    compose._composed(("dataset=cifar10", "final_evaluation=none"))
    monkeypatch.setattr(compose, "_hydra_composed", None)
    local = ("strategy=fedavg", "strategy=fedu", "method=simsiam", "optimizer=adamw", "encoder=resnet18")
    compose._composed(local)
    compose._composed((*local, "final_evaluation=none", "dataset=cifar10"))


def test_another_choice_drops_settings_that_it_lacks():
    """An experiment has ``partition.alpha=0.1`` and ``encoder.width=16`` for its own partition and encoder."""
    config, _ = compose.resolve_config(["experiment=many_rounds", "partition=iid", "encoder=resnet18"])
    assert "alpha" not in config.partition
    assert "width" not in config.encoder
    kept, _ = compose.resolve_config(["experiment=many_rounds", "partition=quantity", "encoder=conv_small"])
    assert (kept.partition.alpha, kept.encoder.width) == (0.1, 16)
    with pytest.raises(InputError, match="there is no setting 'partition.alpha'"):
        compose.resolve_config(["experiment=many_rounds", "partition=iid", "partition.alpha=0.5"])


def test_settings_in_a_node_that_the_choice_lacks_are_dropped():
    choice = OmegaConf.create({"a": {"b": 1}, "open": {}, "empty": None})
    node = OmegaConf.create({"a": {"b": 2, "c": 3}, "open": {"x": 1}, "empty": {"y": 1}, "other": 1})
    compose._keep_settings_of(choice, node)
    assert node == {"a": {"b": 2}, "open": {"x": 1}, "empty": {"y": 1}}
