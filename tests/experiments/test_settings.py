"""Experiments of L-DAWA, FedU and FedU2: their numbers are the papers', or where these say nothing, their codes'."""

import pytest

from fedssl.config.compose import resolve_config
from tests.cases import some

# Clients, of them in a round, rounds, local epochs; data set, partition and what of it is set.
L_DAWA = {  # arXiv 2307.07393, sections 4.1 and 4.2 and the captions of the tables
    "table1": (10, 10, 10, 10, "cifar10", "dirichlet", 0.1),
    "table2": (10, 10, 200, 10, "cifar10", "dirichlet", 0.1),
    "table3_single_class": (10, 10, 200, 10, "cifar10", "pathological", 1),
    "table4": (10, 10, 200, 1, "cifar10", "dirichlet", 0.1),
    "table5": (10, 10, 200, 10, "tiny_imagenet", "dirichlet", 0.1),
    "table6": (100, 10, 100, 10, "cifar10", "dirichlet", 0.1),
    "figure4": (10, 10, 100, 10, "cifar10", "dirichlet", 0.1),
}
FEDU = {  # arXiv 2108.06492, section 4.1
    "table1": (5, 5, 100, 5, "cifar10", "pathological", 2),
    "table4": (5, 5, 800, 1, "cifar10", "pathological", 2),
}
FEDU2 = {"table2": (10, 10, 100, 5, "cifar10", "dirichlet", 0.1)}  # arXiv 2403.16398, section 4.1


def settings(name):
    config, choices = resolve_config([f"experiment={name}"])
    partition = config.partition.get("alpha", config.partition.get("classes_per_client"))
    numbers = (config.num_clients, config.clients_per_round, config.rounds, config.local_epochs)
    return config, choices, (*numbers, choices["dataset"], choices["partition"], partition)


def sgd(config):
    assert config.optimizer._target_ == "torch.optim.SGD"
    return config.batch_size, config.optimizer.lr, config.optimizer.momentum, config.optimizer.weight_decay


@pytest.mark.parametrize("name", some(L_DAWA, default=("table3_single_class",)))
def test_the_numbers_of_l_dawa(name):
    config, choices, numbers = settings(f"l_dawa/{name}")
    assert numbers == L_DAWA[name]
    assert sgd(config) == (256, 0.03, 0.9, 1e-4)
    assert (choices["encoder"], choices["method"], choices["strategy"]) == ("resnet18", "l_dawa/simclr", "l_dawa")
    assert (choices["lr_schedule"], choices["augmentation"]) == ("constant", "simclr")


@pytest.mark.parametrize("name", some(FEDU, default=("table1",)))
def test_the_numbers_of_fedu(name):
    config, choices, numbers = settings(f"fedu/{name}")
    assert numbers == FEDU[name]
    assert sgd(config) == (128, 0.032, 0.9, 5e-4)
    assert (choices["method"], choices["strategy"]) == ("fedu/byol", "fedu")
    assert choices["encoder"] == ("resnet50" if name == "table4" else "resnet18")
    assert (choices["lr_schedule"], choices["augmentation"]) == ("cosine", "easyfl")
    assert (config.method.ema_decay, config.strategy.predictor_threshold) == (0.99, 0.4)


@pytest.mark.parametrize("name", FEDU2)
def test_the_numbers_of_fedu2(name):
    config, choices, numbers = settings(f"fedu2/{name}")
    assert numbers == FEDU2[name]
    assert sgd(config) == (128, 0.048, 0.9, 1e-4)
    assert (choices["encoder"], choices["method"], choices["strategy"]) == ("resnet18", "fedu2/byol", "eua")
    assert (config.regularizer.weight, config.regularizer.tau_a, config.regularizer.tau_b) == (0.1, 0.8, 0.8)
    assert config.method.projector.out_dim == 512
