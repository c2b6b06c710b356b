"""The cases of the gap: passes, gradients, the search, and paired differences."""

import pytest
import torch

from benchmarks import gap
from benchmarks.gap import CASES, CHAIN, SEARCHED, SETTINGS, Case, Row, Training, gaps, table
from fedssl.config.load import compose
from fedssl.model_arrays import exchanged_layers

SMALL = ["dataset=digits", "dataset.limit=120", "num_clients=3", "rounds=1", "local_epochs=1", "encoder.width=4"]


def trained(*overrides):
    return Training(compose([*SETTINGS, *SMALL, "partition.alpha=1", *overrides]))


def test_the_chain_is_of_known_cases():
    assert set(CHAIN.values()) <= {*CASES, SEARCHED}


@pytest.mark.parametrize("case", [Case(mixed=True), Case(), Case(grouped=True), Case(grouped=True, joint_norm=True)])
def test_every_image_is_in_one_batch_of_an_epoch(monkeypatch, case):
    training, seen, groups = trained("batch_size=8"), [], []

    def step(self, group, *, joint):
        groups.append(len(group))
        seen.extend(torch.cat(list(group)).tolist())
        owners = [{int(row in set(part)) for row in batch.tolist()} for batch in group for part in self.parts]
        assert case.mixed or all(len(each) == 1 for each in owners)  # all images of a batch, or none, are a client's

    monkeypatch.setattr(Training, "_step", step)
    training.pool(case)
    assert sorted(seen) == list(range(120))
    assert max(groups) == (3 if case.grouped else 1)


def test_joint_batch_norm_changes_a_step_unlike_group_norm():
    """Without batch norm, the joint pass has the same losses as one pass per batch, so the same step."""
    for norm, equal in (("group", True), ("batch", False)):
        results = []
        for joint in (False, True):
            training = trained(f"encoder.norm={norm}", "optimizer.lr=0.001", "method.projector.num_layers=1")
            training.method.train()
            training._step([torch.arange(10), torch.arange(10, 40)], joint=joint)
            results.append(exchanged_layers(training.method)[_first_kernel(training)])
        assert (abs(results[0] - results[1]).max() < 1e-5) == equal


def _first_kernel(training):
    return next(name for name, array in exchanged_layers(training.method).items() if array.ndim == 4)


def test_the_search_is_at_least_as_good_as_fedavg(monkeypatch):
    monkeypatch.setattr(gap, "CANDIDATES", 6)
    training = trained()
    updates = training.federate()
    before = training._neighbors(exchanged_layers(training.method))
    training.search(updates)
    assert training._neighbors(exchanged_layers(training.method)) >= before


def test_differences_are_paired_by_seed():
    def rows(values):
        return {seed: Row("x", "", seed, {"knn": value}, "", "", "") for seed, value in values.items()}

    stored = {"centralized": rows({0: 0.5, 1: 0.7}), "fedavg": rows({0: 0.4, 1: 0.4, 2: 0.9})}
    assert gaps(stored, "centralized", "fedavg", "knn") == pytest.approx([-10, -30])
    assert "-20.0 ± 14.1" in table(stored)


@pytest.mark.parametrize("arguments", [["--data", "cifar10"], ["dataset=cifar10"]])
def test_rows_of_other_images_have_another_name(arguments, monkeypatch):
    """The images without overrides are the digits, and rows without --data are theirs."""
    monkeypatch.setattr("sys.argv", ["gap.py", *arguments])
    monkeypatch.setattr(gap, "run", lambda *_: pytest.fail("it trained"))
    with pytest.raises(SystemExit, match="give --data NAME and overrides, or neither, for the digits"):
        gap.main()


def test_a_table_without_centralized_training_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gap, "ROWS", tmp_path / "gap.jsonl")
    monkeypatch.setattr("sys.argv", ["gap.py", "--seeds"])
    with pytest.raises(SystemExit, match="digits has no rows of centralized; repeat the command with all --cases"):
        gap.main()


def test_a_result_that_the_rows_lack_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gap.py", "--seeds", "--result", "linaer"])
    with pytest.raises(SystemExit, match="^gap: --result 'linaer' is not in the rows; choose from .*linear"):
        gap.main()
