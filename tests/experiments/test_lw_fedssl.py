"""Experiments of LW-FedSSL: their numbers are the paper's."""

from math import cos, pi

import numpy as np
import pytest

from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
from fedssl.partition import client_indices
from fedssl.schedule.lr import LRSchedule
from fedssl.schedule.phases import make_phases
from tests.cases import some
from tests.experiments.every import write_images

LW_FEDSSL = ("fedmoco", "fedbyol", "fedsimclr", "fedmoco_lw", "fll", "lw_fedssl", "prog_fedssl")
DEFAULT = ("lw_fedssl",)


@pytest.mark.parametrize("name", some(LW_FEDSSL, default=DEFAULT))
def test_the_numbers_of_lw_fedssl(name):
    """Section 5.1 and Tables 7 and 8 of arXiv 2401.11647."""
    config = compose([f"experiment=lw_fedssl/{name}"]).recording.config
    simclr = name in ("fedsimclr", "fll")
    assert (config.num_clients, config.clients_per_round, config.rounds, config.local_epochs) == (10, 10, 180, 3)
    assert config.batch_size == (512 if simclr else 1024)
    assert config.optimizer._target_ == "torch.optim.AdamW"
    assert config.optimizer.lr == pytest.approx(1.5e-4 * config.batch_size / 256)
    assert config.optimizer.weight_decay == 1e-5
    assert config.method.get("temperature", 0.2) == 0.2
    assert (config.encoder.depth, config.encoder.width, config.encoder.patch, config.encoder.size) == (12, 192, 4, 32)
    assert config.encoder.positions == "sincos"
    assert (config.dataset.hub, config.dataset.splits.federated) == ("jxie/stl10", "unlabeled")
    assert config.partition._target_ == "fedssl.partition.iid"
    assert (config.strategy._target_, config.strategy.weighting) == ("strategies.fedavg.FedAvg", "examples")
    first, second = config.augmentation.views
    probs = first.blur_prob, first.get("solarize_prob", 0), second.blur_prob, second.solarize_prob
    assert probs == (1.0, 0, 0.1, 0.2)
    head = config.method.projector
    sizes = head.hidden_dim, head.out_dim, head.num_layers
    assert (*sizes, head.batch_norm, head.last_batch_norm) == (4096, 256, 3, True, True)
    if not simclr:
        head = config.method.predictor
        sizes = head.hidden_dim, head.out_dim, head.num_layers
        assert (*sizes, head.batch_norm, head.last_batch_norm) == (4096, 256, 2, True, True)
        assert (config.method.ema_decay, config.method.target_init) == (0.99, "reset")
    if "moco" in config.method._target_:
        assert (config.method.loss_scale, config.method.train_patches) == (1, True)


@pytest.mark.parametrize("name", some(LW_FEDSSL, default=DEFAULT))
def test_the_schedules_of_lw_fedssl(name):
    settings = compose([f"experiment=lw_fedssl/{name}", "encoder.width=12"])
    phases = make_phases(settings.model.schedule, stages=12)
    frozen = [phase.frozen for phase in phases]
    dropout = {phase.depth_dropout for phase in phases}
    if name in ("fedmoco", "fedbyol", "fedsimclr"):
        assert len(phases) == 1
    else:
        assert [phase.rounds for phase in phases] == [15] * 12
        assert all(phase.weight_transfer for phase in phases)
        assert frozen == ([0] * 12 if name == "prog_fedssl" else list(range(12)))
    assert dropout == ({0.5} if name == "fll" else {0.0})
    schedule = LRSchedule(settings.lr_schedule.instantiate(), phases, settings.rounds)
    expected = [0.5 * (1 + cos(pi * done / 180)) for done in (0, 90, 179)]
    assert [schedule(round) for round in (1, 91, 180)] == pytest.approx(expected)


def test_the_calibration_of_lw_fedssl_is_of_cifar10(tmp_path):
    """All of STL-10 is the clients'; the server has 10% of the training images of CIFAR-10, trains as they do."""
    write_images(tmp_path, splits={"unlabeled": 24, "train": 40})
    data = [f"dataset.path={tmp_path}", f"calibration.dataset.path={tmp_path}"]
    settings = compose(["experiment=lw_fedssl/lw_fedssl", "num_clients=2", *data])
    calibration = settings.calibration
    assert (calibration.has_own_dataset, calibration.share) == (True, 0.1)
    assert (calibration.epochs, calibration.when) == (3, "end")
    assert calibration.data.federated == "train"
    assert load_federated(calibration.data).images.shape == (40, 3, 32, 32)
    clients = load_federated(settings.data)
    assert clients.images.shape == (24, 3, 32, 32)
    assert sorted(np.concatenate(client_indices(settings.partition, clients))) == list(range(24))
    assert settings.training.regularizer.values["weight"] == 0.01
    assert settings.training.regularizer.values["temperature"] == 0.2
    assert settings.training.regularizer.values["distance"] == "info_nce"
    assert compose(["experiment=lw_fedssl/fedmoco_lw"]).calibration is None
