"""Every method learns: a federation in small against encoders that did not, on digits and, where given, on CIFAR-10.

The rival is the same run with a learning rate of 0. It is the stronger one: its batch norm has gathered running
statistics of the pictures, which alone is worth some points (in kNN on CIFAR-10 more than two).
"""

import json
import os
from pathlib import Path

import pytest

from simulation.cli import run

pytestmark = pytest.mark.slow

COMMON = [
    *("num_clients=3", "partition=iid", "encoder.width=16", "strategy=fedavg", "optimizer=adam", "batch_size=32"),
    *("threads=1", "evaluate_every=0", "health_pictures=0"),
]
DIGITS = [*COMMON, "dataset.limit=600", "rounds=6", "local_epochs=3", "final_evaluation=few_labels"]
PICTURES = [
    *(*COMMON, "dataset=cifar10", "dataset.limit=2000", "dataset.test_limit=2000"),
    *("rounds=3", "local_epochs=4", "final_evaluation=linear"),
]
NO_LEARNING = ["optimizer.lr=0", "rounds=1", "local_epochs=1"]
OWN = {
    "byol": ["method.projector.last_norm=true"],
    "orchestra": ["strategy=orchestra", "batch_size=16", "method.global_clusters=32"],
    "simsiam": ["method.projector.layers=1"],
}


def accuracy(folder: Path, metric: str, *words: str) -> float:
    """Of the global encoder after the last round, in %."""
    run([*words, f"output_dir={folder}"])
    return 100 * json.loads((folder / "summary.json").read_text())["final"]["federated"][metric]


@pytest.fixture(scope="module")
def unlearned(tmp_path_factory):
    """Digits. All methods begin with the same encoder, so one serves as the rival of all."""
    return accuracy(tmp_path_factory.mktemp("digits") / "run", "linear_2_per_class", *DIGITS, *NO_LEARNING)


# The mean over ten draws has a standard error of one point; the methods gain 8 to 32.
@pytest.mark.parametrize(
    "method", ["simclr", "byol", "simsiam", "barlow_twins", "moco_v3", "fedx", "orchestra", "supervised"]
)
def test_every_method_learns_from_digits(method, unlearned, tmp_path):
    words = [*DIGITS, f"method={method}", *OWN.get(method, [])]
    assert accuracy(tmp_path / "run", "linear_2_per_class", *words) > unlearned + 4


def test_a_collapse_is_told_while_it_happens(tmp_path):
    """Without normalisation behind its projector SimSiam lets pictures vary along one line only."""
    words = ["experiment=digits_methods", "method=simsiam", "final_evaluation=none", "evaluation=none", "threads=1"]
    words += ["rounds=8", "evaluate_every=8", "health_pictures=256", "measure_resources=false"]
    run([*words, "method.projector.last_norm=false", "method.projector.layers=2", f"output_dir={tmp_path / 'run'}"])
    assert "the representation has collapsed in the global model" in (tmp_path / "run" / "run.log").read_text()


# 2,000 test pictures: a difference has a standard error of little more than one point; SimCLR gains 9.
@pytest.mark.skipif("FEDSSL_DATA" not in os.environ, reason="FEDSSL_DATA names no folder with cifar10-*.parquet")
def test_simclr_learns_from_pictures(tmp_path):
    words = [*PICTURES, f"dataset.path={os.environ.get('FEDSSL_DATA')}/cifar10-*.parquet"]
    unlearned = accuracy(tmp_path / "unlearned", "linear", *words, *NO_LEARNING)
    assert accuracy(tmp_path / "run", "linear", *words) > unlearned + 4
