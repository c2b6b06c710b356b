"""Buffers that a user's method assigns anew are exchanged, saved and separated like those that it changes in place."""

import pytest
import torch
from torch import nn

from fedssl.errors import InputError, RunError
from fedssl.methods.saved_buffers import SavedBuffers
from fedssl.methods.simclr import SimCLR
from simulation.run import run
from tests.runs import SMALL, model_bits


class Centered(SimCLR):
    """SimCLR whose loss has a running mean of the representations, kept in a way that a subclass selects."""

    def __init__(self, encoder, **arguments) -> None:
        super().__init__(encoder, **arguments)
        self.register_buffer("center", torch.zeros(encoder.feature_dim))

    def set_center(self, value) -> None:
        self.center.copy_(value)

    def loss(self, views):
        h = self.encoder(views[0].images)
        loss = super().loss(views) + (h - self.center).square().mean()
        self.set_center(0.5 * self.center + h.detach().mean(0))
        if self.round == 1 and self.client == 0 and self.fails:
            raise ValueError("failed")
        return loss

    def start_round(self, *, first) -> None:
        super().start_round(first=first)
        self.set_center(self.center + 0.1)

    def on_step_end(self) -> None:
        super().on_step_end()
        self.set_center(1.1 * self.center)

    def end_round(self) -> None:
        super().end_round()
        self.set_center(self.center + 0.2)

    fails = False


class Assigned(Centered):
    def set_center(self, value) -> None:
        self.center = value


class Failing(Centered):
    fails = True


class AssignedFailing(Assigned):
    fails = True


class Growing(Centered):
    def set_center(self, value) -> None:
        self.center = torch.cat([self.center, value])[: len(self.center) + 1]


def words(target, folder, *others) -> list[str]:
    start = ["strategy=fedavg", "rounds=2", "final_evaluation=none", "partition=iid", "dataset.limit=40"]
    return [*SMALL, *start, f"method._target_={target}", f"output_dir={folder}", *others]


@pytest.mark.parametrize(
    ("pair", "others"),
    [
        (("Centered", "Assigned"), []),
        (("Centered", "Assigned"), ["optimizer=sam"]),
        (("Centered", "Assigned"), ["calibration=auxiliary"]),
        (("Centered", "Assigned"), ["strategy=clustered", "strategy.clusters=2", "rounds=3"]),
        (("Failing", "AssignedFailing"), ["aggregation.min_updates=1", "rounds=3"]),
    ],
)
def test_an_assigned_buffer_is_exchanged_like_one_in_place(tmp_path, pair, others) -> None:
    for target in pair:
        run(words(f"{__name__}.{target}", tmp_path / target, *others))
    first, second = (model_bits(tmp_path / target) for target in pair)
    assert first == second
    assert any(name == "center" and any(bits) for _, name, bits in first)


def test_a_buffer_keeps_its_shape(tmp_path) -> None:
    with pytest.raises(
        RunError, match="client 0, 1: it failed: the buffer center of shape .8,. became one of shape .9,"
    ):
        run(words(f"{__name__}.Growing", tmp_path / "run"))


def test_buffers_are_the_same_tensors_with_the_new_values() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("cached", torch.zeros(2), persistent=False)
    buffers, before = SavedBuffers(norm), norm.running_mean
    norm.running_mean, norm.cached = torch.ones(2, dtype=torch.float64), torch.zeros(3)
    buffers.keep()
    assert norm.running_mean is before
    assert before.tolist() == [1, 1]
    assert norm.cached.shape == (3,)  # a table for images of another size
    norm.running_mean = torch.zeros(2)
    buffers.restore()
    assert norm.running_mean is before
    assert before.tolist() == [1, 1]
    for value, found in ((None, "None"), (torch.ones(3), "one of shape .3,.")):
        norm.running_mean = value
        with pytest.raises(InputError, match=f"running_mean of shape .2,. became {found}; keep its shape"):
            buffers.keep()
    norm.num_batches_tracked = torch.tensor(1.5)
    with pytest.raises(InputError, match=r"num_batches_tracked of torch.int64 became one of torch.float32; keep its"):
        buffers.keep()
