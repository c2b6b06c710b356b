"""Runs on one's own images: what is found out, chosen or refused before the first round."""

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from fedssl.config.load import compose
from fedssl.datasets import base, cache
from fedssl.errors import InputError
from fedssl.evaluation.protocol import evaluation_problem
from server_app.evaluator import missing_evaluations
from simulation.run import run
from tests.federation import Federation
from tests.runs import read_lines, read_summary

SMALL = ["dataset=folder", "dataset.size=16", "num_clients=3", "rounds=1", "local_epochs=1", "encoder.width=4"]
SMALL += ["threads=1", "measure_resources=false", "collapse_images=0", "final_evaluation=knn"]


def write_images(folder, number=12):
    folder.mkdir(parents=True)
    for seed in range(number):
        pixels = np.random.default_rng(seed).integers(256, size=(16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png")


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat") / "mine"
    write_images(folder)
    return folder


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    for name in ("cat", "dog"):
        write_images(folder / name)
    return folder


def test_images_without_labels_are_divided_evenly(flat, tmp_path, capsys):
    run([*SMALL, f"dataset.path={flat}", f"output_dir={tmp_path / 'run'}"])
    said = capsys.readouterr().out
    assert "partition=dirichlet needs labels, which the images lack; using partition=iid instead" in said
    assert "evaluation and final_evaluation will have no results: the data set has no labeled training images" in said
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "finished"
    assert "partition=iid" in summary["overrides"]
    assert [word for word in summary["overrides"] if "path" in word] == [f"dataset.path='{flat}'"]
    assert OmegaConf.load(tmp_path / "run" / "choices.yaml").partition == "iid"
    assert [line.split(",")[1] for line in (tmp_path / "run" / "partition.csv").read_text().split()[1:]] == ["4"] * 3
    run([f"resume={tmp_path / 'run'}", "rounds=2"])
    assert "using partition=iid" not in capsys.readouterr().out
    assert read_summary(tmp_path / "run")["rounds"] == 2


def test_a_run_on_cached_images_has_the_same_bits(classes, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MIN_SECONDS_TO_CACHE", 0)
    overrides, found = ["calibration=auxiliary", "calibration.share=0.3"], {}
    for name, place in {"memory": "null", "file": tmp_path / "cache", "the file again": tmp_path / "cache"}.items():
        base.forget_images()
        own = [f"dataset.path={classes}", f"dataset.cache={place}", f"run_id={name[:3]}"]
        federation = Federation(tmp_path / name, *SMALL, *overrides, *own)
        found[name] = federation.run(1)
    assert len(list((tmp_path / "cache").glob("*/pixels"))) == 2  # of the clients, and of the test
    for layers in found.values():
        assert all(np.array_equal(layers[name], value) for name, value in found["memory"].items())


@pytest.mark.parametrize("word", ["partition.alpha=1", "partition=skew"])
def test_a_partition_that_is_chosen_stays(flat, tmp_path, word):
    with pytest.raises(InputError, match="divides by class but the images have no labels; give partition=iid"):
        run([*SMALL, f"dataset.path={flat}", word, f"output_dir={tmp_path}"])


def test_each_evaluation_without_images_is_named(tmp_path):
    """The images have no labels, and are in folders of splits."""
    for split in ("train", "test"):
        write_images(tmp_path / split)
    own = ["dataset=folder", f"dataset.path={tmp_path}"]
    several_labels = ["evaluation=multi_label", "evaluation.file=tags.csv"]
    for overrides, names in (
        ([], {"evaluation", "final_evaluation"}),
        (several_labels, {"final_evaluation"}),
        ([*several_labels, "final_evaluation=none"], set()),
        (["evaluate_every=0", "final_evaluation=none"], set()),
    ):
        assert missing_evaluations(compose([*own, *overrides])).keys() == names


def test_what_is_missing_for_an_evaluation_is_said(flat, classes):
    own = ["dataset=folder", f"dataset.path={classes}"]
    assert evaluation_problem(compose(own).data) is None
    for overrides, message in (
        (
            [*own, "dataset.test_fraction=0"],
            "the data set has no labeled test images (dataset.splits.test=test names no images); set "
            "dataset.splits.test to a split with labeled images, or hold out a share of the training images with "
            "dataset.test_fraction=0.2",
        ),
        (
            [*own, f"dataset.path={flat}"],
            "the data set has no labeled training images (dataset.splits.train=train names images without "
            "labels); set dataset.splits.train to a split with labeled images, or name the column of the labels with "
            "dataset.label=COLUMN, or use a subfolder for each of two or more classes",
        ),
        (
            ["dataset=digits", "dataset.splits.train=null"],
            "the data set has no labeled training images (dataset.splits.train=null names no images); set "
            "dataset.splits.train to a split with labeled images",
        ),
    ):
        assert evaluation_problem(compose(overrides).data) == message
    unlabeled = compose([*own, f"dataset.path={flat}"]).data
    assert "divide the files into folders train and test, or a table" in evaluation_problem(
        unlabeled, needs_labels=False
    )


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("barlow_twins", "BarlowTwins"),
        ("byol", "BYOL"),
        ("simsiam", "SimSiam"),
        ("moco_v3", "MoCoV3"),
        ("fedx", "FedX"),
    ],
)
def test_batches_of_which_a_method_learns_nothing_are_refused(tmp_path, method, name):
    message = f"batch_size=2 but {name} needs batches of at least 3 images; set batch_size=3 or more"
    with pytest.raises(InputError, match=message):
        Federation(tmp_path, f"method={method}", "batch_size=2")


@pytest.fixture
def owners(tmp_path):
    """Three owners, of whom one has two images only."""
    for name, number in (("few", 2), ("one", 4), ("two", 5)):
        write_images(tmp_path / "owners" / name, number)
    return [*SMALL, f"dataset.path={tmp_path / 'owners'}", "dataset.folders=owner", "partition=natural"]


def test_clients_with_too_few_images_are_never_sampled(owners, tmp_path, capsys):
    run([*owners, "method=byol", "rounds=2", f"output_dir={tmp_path / 'run'}"])
    table = [row.split(",")[:2] for row in (tmp_path / "run" / "partition.csv").read_text().split()[1:]]
    [few] = [client for client, number in table if number == "2"]
    assert f"1 of 3 clients never train, since BYOL needs at least 3 images: {few}\n" in capsys.readouterr().out
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["clients"], line["dropped"]) for line in lines] == 2 * [(2, {})]
    assert read_summary(tmp_path / "run")["clients_with_few_images"] == 1


def test_more_clients_than_the_images_fill(tmp_path):
    """10 images of 7 clients: three clients have two images, and each round samples two of the three."""
    write_images(tmp_path / "images", 10)
    overrides = [*SMALL, f"dataset.path={tmp_path / 'images'}", "partition=iid", "num_clients=7", "clients_per_round=2"]
    run([*overrides, "rounds=3", "evaluate_every=0", f"output_dir={tmp_path / 'run'}"])
    sizes = dict(row.split(",")[:2] for row in (tmp_path / "run" / "partition.csv").read_text().split()[1:])
    trainable = {int(client) for client, size in sizes.items() if size == "2"}
    rows = read_lines(tmp_path / "run" / "clients.jsonl")
    assert sorted(sizes.values()) == ["1", "1", "1", "1", "2", "2", "2"]
    assert [row["round"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert {row["client"] for row in rows} <= trainable


def test_a_federation_of_clients_with_too_few_images_is_refused(owners, tmp_path):
    sentence = "no client has the 3 images that BYOL needs, .*=3; set partition=iid and num_clients=2 or lower"
    with pytest.raises(InputError, match=sentence):
        run([*owners, "dataset.limit=6", "partition=iid", "method=byol", f"output_dir={tmp_path / 'run'}"])
    overrides = [*owners, "dataset.limit=6", "partition=iid", "num_clients=2", "method=byol"]
    run([*overrides, f"output_dir={tmp_path / 'other'}"])
