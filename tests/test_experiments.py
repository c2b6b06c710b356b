"""Experiments of papers: their numbers are the paper's, and each runs, on pictures of the data sets' form."""

import io
import json
import re
import shlex
from itertools import product
from math import cos, pi

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from fedssl.composition import check_names
from fedssl.config import compose
from fedssl.datasets.base import load_federated
from fedssl.methods.build import build
from fedssl.partition import split
from fedssl.schedule.lr import LRSchedule
from fedssl.schedule.phases import make_phases
from fedssl.words import CONF, parse
from simulation.cli import run

LW_FEDSSL = ("fedmoco", "fedbyol", "fedsimclr", "fedmoco_lw", "fll", "lw_fedssl", "prog_fedssl")

DEC_SSL = {  # what each runs here: its own rule or method, and the one or other of the words in its head
    "dec_ssl": ["method=supervised"],
    "dec_ssl_figure2": ["partition=feature_clusters"],
    "dec_ssl_figure4": ["clients_per_round=2"],
    "dec_ssl_figure5": ["strategy.clusters=2"],
    "dec_ssl_figure13": [],
    "dec_ssl_figure15": ["num_clients=20"],
    "dec_ssl_figure16": ["strategy=fedbn"],
    "dec_ssl_table2": ["strategy=per_ssl"],
    "dec_ssl_transfer": ["local_epochs=0"],
}
QUICK = ("dec_ssl_figure5", "dec_ssl_figure13")


def parquet(path, *, column, size, number, labels):
    """Random pictures as the Hub stores them; all have one label, or ``labels`` gives one for each."""
    random, pictures = np.random.default_rng(size), []
    for _ in range(number):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (size, size, 3), np.uint8)).save(file, "PNG")
        pictures.append({"bytes": file.getvalue(), "path": None})
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {column: pa.array(pictures, struct), "label": pa.array(np.broadcast_to(labels, number), pa.int64())}
    pq.write_table(pa.table(columns), path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Words that name small files of the form of STL-10, without labels, and CIFAR-10."""
    folder = tmp_path_factory.mktemp("data")
    parquet(folder / "unlabeled-0.parquet", column="image", size=96, number=24, labels=-1)
    (folder / "cifar").mkdir()
    parquet(folder / "cifar" / "train-0.parquet", column="img", size=32, number=40, labels=3)
    stl = [f"dataset.path={folder}/unlabeled-0.parquet"]
    words = dict.fromkeys(LW_FEDSSL, stl) | {"lw_fedssl": [*stl, f"calibration.dataset.path={folder}/cifar"]}
    (folder / "ten").mkdir()
    for part, number in (("train", 60), ("test", 20)):
        file = folder / "ten" / f"{part}-0.parquet"
        parquet(file, column="img", size=32, number=number, labels=np.arange(number) % 10)
    ten = [f"dataset.path={folder}/ten", "dataset.label=label"]
    return words | dict.fromkeys(DEC_SSL, ten)


@pytest.mark.parametrize("name", LW_FEDSSL)
def test_the_numbers_of_lw_fedssl(name):
    """Section 5.1 and Tables 7 and 8 of arXiv 2401.11647."""
    config = OmegaConf.create(compose([f"experiment={name}"]).recording.text)
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
    assert (first.blur, first.get("solarize", 0), second.blur, second.solarize) == (1.0, 0, 0.1, 0.2)
    head = config.method.projector
    assert (head.hidden, head.out, head.layers, head.norm, head.last_norm) == (4096, 256, 3, True, True)
    if not simclr:
        head = config.method.predictor
        assert (head.hidden, head.out, head.layers, head.norm, head.last_norm) == (4096, 256, 2, True, True)
        assert (config.method.ema_decay, config.method.target) == (0.99, "copy")
    if "moco" in config.method._target_:
        assert (config.method.loss_scale, config.method.train_patches) == (1, True)


@pytest.mark.parametrize("name", LW_FEDSSL)
def test_the_schedules_of_lw_fedssl(name):
    settings = compose([f"experiment={name}", "encoder.width=12"])
    phases = make_phases(settings.model.schedule, stages=12)
    frozen = [phase.frozen for phase in phases]
    dropout = {phase.dropout for phase in phases}
    if name in ("fedmoco", "fedbyol", "fedsimclr"):
        assert len(phases) == 1
    else:
        assert [phase.rounds for phase in phases] == [15] * 12
        assert all(phase.transfer for phase in phases)
        assert frozen == ([0] * 12 if name == "prog_fedssl" else list(range(12)))
    assert dropout == ({0.5} if name == "fll" else {0.0})
    schedule = LRSchedule(settings.lr_schedule.make(), phases, settings.rounds)
    assert [schedule(round) for round in (1, 91, 180)] == pytest.approx(
        [0.5 * (1 + cos(pi * done / 180)) for done in (0, 90, 179)]
    )


def test_the_calibration_of_lw_fedssl_is_of_cifar10(data):
    """All of STL-10 is the clients'; the server has 10% of the training pictures of CIFAR-10, trains as they do."""
    settings = compose(["experiment=lw_fedssl", "num_clients=2", *data["lw_fedssl"]])
    calibration = settings.calibration
    assert (calibration.own, calibration.share, calibration.epochs, calibration.at) == (True, 0.1, 3, "end")
    assert calibration.data.federated == "train"
    assert load_federated(calibration.data).images.shape == (40, 3, 32, 32)
    clients = load_federated(settings.data)
    assert clients.images.shape == (24, 3, 32, 32)
    assert sorted(np.concatenate(split(settings.partition, clients))) == list(range(24))
    assert settings.training.regularizer.values["weight"] == 0.01
    assert settings.training.regularizer.values["temperature"] == 0.2
    assert settings.training.regularizer.values["distance"] == "info_nce"
    assert all(compose([f"experiment={name}"]).calibration is None for name in LW_FEDSSL if name != "lw_fedssl")


@pytest.mark.parametrize("name", LW_FEDSSL)
def test_an_experiment_of_lw_fedssl_runs(tmp_path, data, name):
    words = ["num_clients=2", "rounds=2", "local_epochs=1", "batch_size=6", "threads=1", "health_pictures=0"]
    words += ["encoder.depth=2", "encoder.width=16", "encoder.heads=2", "method.projector.hidden=8", "evaluate_every=0"]
    words += [] if name in ("fedsimclr", "fll") else ["method.predictor.hidden=8"]
    run([f"experiment={name}", *words, *data[name], "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    saved = torch.load(max((tmp_path / "run" / "checkpoints").glob("round-*.pt")), weights_only=True)
    trained, fresh = saved["models"]["global"]["layers"], build(compose([f"experiment={name}", *words]).model)
    assert all(torch.isfinite(layer).all() for layer in trained.values())
    # Calibration trains both blocks in the last phase; without it clients train each block in its own.
    moved = [not torch.equal(trained[key], fresh.tensors[key]) for key in trained if key.endswith("mlp.0.weight")]
    assert moved == [True, True]


def resolved(*words):
    return OmegaConf.create(compose(list(words)).recording.text)


def heads(name):
    """The words of each command in the head of an experiment's file, without swept seeds."""
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    commands = [line for line in lines if re.match(r"# fedssl( |$)", line)]
    return [[word for word in shlex.split(line)[2:] if word != "-m" and "seed=" not in word] for line in commands]


def jobs(words):
    """The words of every run of a sweep."""
    values = [
        [f"{word.key_or_group}={value}" for value in word.sweep_string_iterator()]
        if word.is_sweep_override()
        else [word.input_line]
        for word in parse(words)
    ]
    return product(*values)


@pytest.mark.parametrize("name", DEC_SSL)
def test_the_commands_in_the_heads_of_dec_ssl_name_what_there_is(name):
    assert heads(name)
    for words in heads(name):
        assert any(word.startswith("experiment=dec_ssl") for word in words)
        check_names(words)


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEC_SSL)
def test_every_run_of_dec_ssl_composes(name):
    for words in heads(name):
        for job in jobs(words):
            compose(list(job)).algorithm.strategy.make()


@pytest.mark.parametrize("name", DEC_SSL)
def test_the_numbers_of_dec_ssl(name):
    """Sections 3.1 and 4.1 of arXiv 2210.10947 and the authors' code: 500 epochs in all, by Adam, E=50."""
    settings = compose([f"experiment={name}"])
    config = OmegaConf.create(settings.recording.text)
    clients = {"dec_ssl_figure4": 20, "dec_ssl_figure13": 10, "dec_ssl_figure15": 100}.get(name, 5)
    assert (config.num_clients, config.clients_per_round) == (clients, clients)
    assert config.local_epochs == (5 if name == "dec_ssl_figure4" else 50)
    assert config.rounds * config.local_epochs == 500
    assert config.batch_size == 256
    assert config.optimizer._target_ == "torch.optim.Adam"
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-3, 1e-6)
    assert (config.encoder._target_, config.encoder.stem) == ("fedssl.encoders.resnet18", "small")
    assert config.dataset.hub == ("uoft-cs/cifar100" if name == "dec_ssl_transfer" else "uoft-cs/cifar10")
    head = config.method.projector
    assert (head.hidden, head.out, head.layers, config.method.temperature) == (512, 512, 2, 0.5)
    assert all(view.crop_scale == [0.08, 1.0] and "blur" not in view for view in config.augmentation.views)
    featarc = name in ("dec_ssl_figure5", "dec_ssl_figure16", "dec_ssl_table2")
    if featarc:
        assert (config.strategy._target_, config.strategy.clusters) == ("strategies.featarc.FeatARC", 2)
        assert (config.regularizer.distance, config.regularizer.weight) == ("cosine", 1)
        assert config.strategy.weighting == "uniform"
        assert config.evaluate_clients
    else:
        assert config.strategy._target_ == "strategies.fedavg.FedAvg"
        assert config.regularizer._target_ == "fedssl.regularizers.base.Regularizer"
    rates = LRSchedule(settings.lr_schedule.make(), make_phases(settings.model.schedule, stages=4), config.rounds)
    falling = [1, 1, 1, 0.3, 0.3, 0.3, 0.09, 0.09, 0.09, 0.027]  # MultiStepLR at 30, 60 and 90% of the rounds
    tenths = range(1, config.rounds + 1, config.rounds // 10)
    assert [rates(round) for round in tenths] == pytest.approx([1] * 10 if featarc else falling)


@pytest.mark.parametrize(
    ("name", "classes"),
    [("dec_ssl_figure5", 2), ("dec_ssl_figure15", 1)],
)
def test_the_partitions_of_dec_ssl(name, classes):
    """Clients have equal numbers of pictures, so that a mean of clients is one of pictures too."""
    settings = compose([f"experiment={name}"]).partition
    labels = torch.arange(1000) % 10
    parts = settings.rule.make(labels, num_pictures=1000, num_clients=settings.num_clients, seed=0)
    assert {len(part) for part in parts} == {1000 // settings.num_clients}
    assert {len(labels[part].unique()) for part in parts} == {classes}


def test_the_parts_of_featarc_are_words():
    """Figure 5: one model without alignment is FedAvg, with it "Align Only"; two without it "Cluster Only"."""
    config = resolved("experiment=dec_ssl_figure5", "strategy.clusters=1", "regularizer=none")
    assert (config.strategy.clusters, config.regularizer._target_) == (1, "fedssl.regularizers.base.Regularizer")
    for strategy, term in (("fedprox", "Proximal"), ("fedbn", "Regularizer")):  # Figure 16: none of them is aligned
        assert resolved("experiment=dec_ssl_figure16", f"strategy={strategy}").regularizer._target_.endswith(term)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.heavy) for n in DEC_SSL])
def test_an_experiment_of_dec_ssl_runs(tmp_path, data, name):
    words = ["rounds=1", "local_epochs=1", "batch_size=8", "threads=1", "health_pictures=0", "encoder=conv_small"]
    words += [
        "encoder.width=4",
        "final_evaluation=knn",
        "evaluation=none",
        "measure_resources=false",
        "engine=local",
        *DEC_SSL[name],
    ]
    run([f"experiment={name}", *words, *data[name], f"output_dir={tmp_path / 'run'}"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert 0 <= summary["final"]["federated"]["knn"] <= 1
