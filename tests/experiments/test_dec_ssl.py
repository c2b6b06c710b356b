"""Experiments of Dec-SSL: their numbers are the paper's and its code's."""

import pytest
import torch

from fedssl.config.load import compose
from fedssl.schedule.lr import LRSchedule
from fedssl.schedule.phases import make_phases
from tests.cases import some
from tests.fedssl.partition.made import partition_input

DEC_SSL = (
    *("base", "figure2", "figure4", "figure5", "figure13", "figure15", "figure16"),
    *("table2", "table2_transfer"),
)


@pytest.mark.parametrize("name", some(DEC_SSL, default=("figure5",)))
def test_the_numbers_of_dec_ssl(name):
    """Sections 3.1 and 4.1 of arXiv 2210.10947 and the authors' code: 500 epochs in all, by Adam, E=50."""
    settings = compose([f"experiment=dec_ssl/{name}"])
    config = settings.recording.config
    clients = {"figure4": 20, "figure13": 10, "figure15": 100}.get(name, 5)
    assert (config.num_clients, config.clients_per_round) == (clients, clients)
    assert config.local_epochs == (5 if name == "figure4" else 50)
    assert config.rounds * config.local_epochs == 500
    assert config.batch_size == 256
    assert config.optimizer._target_ == "torch.optim.Adam"
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-3, 1e-6)
    assert (config.encoder._target_, config.encoder.stem) == ("fedssl.encoders.resnet18", "small")
    assert config.dataset.hub == ("uoft-cs/cifar100" if name == "table2_transfer" else "uoft-cs/cifar10")
    head = config.method.projector
    assert (head.hidden_dim, head.out_dim, head.num_layers, config.method.temperature) == (512, 512, 2, 0.5)
    assert all(view.crop_scale == [0.08, 1.0] and "blur_prob" not in view for view in config.augmentation.views)
    featarc = name in ("figure5", "figure16", "table2")
    if featarc:
        assert (config.strategy._target_, config.strategy.clusters) == ("strategies.featarc.FeatARC", 2)
        assert (config.regularizer.distance, config.regularizer.weight) == ("cosine", 1)
        assert config.strategy.weighting == "uniform"
        assert config.evaluate_personalized
    else:
        assert config.strategy._target_ == "strategies.fedavg.FedAvg"
        assert config.regularizer._target_ == "fedssl.regularizers.base.Regularizer"
    rates = LRSchedule(
        settings.lr_schedule.instantiate(), make_phases(settings.model.schedule, stages=4), config.rounds
    )
    falling = [1, 1, 1, 0.3, 0.3, 0.3, 0.09, 0.09, 0.09, 0.027]  # MultiStepLR at 30, 60 and 90% of the rounds
    tenths = range(1, config.rounds + 1, config.rounds // 10)
    assert [rates(round) for round in tenths] == pytest.approx([1] * 10 if featarc else falling)


@pytest.mark.parametrize(("name", "classes"), [("figure15", 1)])
def test_the_partitions_of_dec_ssl(name, classes):
    """Clients have equal numbers of images, so that a mean of clients is one of images too."""
    settings = compose([f"experiment=dec_ssl/{name}"]).partition
    labels = torch.arange(1000) % 10
    parts = settings.rule.instantiate(partition_input(labels, num_clients=settings.num_clients))
    assert {len(part) for part in parts} == {1000 // settings.num_clients}
    assert {len(labels[part].unique()) for part in parts} == {classes}
