"""State of a user's modules outside of the layers: buffers that are assigned anew, attributes, random constants."""

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.encoders.factory import ConvSmall, conv_small
from fedssl.errors import InputError, RunError
from fedssl.methods.simclr import SimCLR
from fedssl.methods.unsaved_state import Buffers, UnsavedState
from simulation.run import run
from tests.federation import Federation
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
        return loss


class Assigned(Centered):
    def set_center(self, value) -> None:
        self.center = value


class Growing(Centered):
    def set_center(self, value) -> None:
        self.center = torch.cat([self.center, value])[: len(self.center) + 1]


def words(target, folder, **more) -> list[str]:
    start = ["strategy=fedavg", "rounds=2", "final_evaluation=none", "partition=iid", "dataset.limit=40"]
    others = [f"{key}={value}" for key, value in more.items()]
    return [*SMALL, *start, f"method._target_={__name__}.{target}", f"output_dir={folder}", *others]


@pytest.mark.parametrize("optimizer", ["sgd", "sam"])
def test_an_assigned_buffer_is_exchanged_like_one_in_place(tmp_path, optimizer) -> None:
    folders = [tmp_path / name for name in ("Centered", "Assigned")]
    for folder in folders:
        run(words(folder.name, folder, optimizer=optimizer))
    first, second = (model_bits(folder) for folder in folders)
    assert first == second
    assert any(name == "center" and any(bits) for _, name, bits in first)


def test_a_buffer_keeps_its_shape(tmp_path) -> None:
    with pytest.raises(
        RunError, match="client 0, 1: it failed: the buffer center of shape .8,. became one of shape .9,.; keep"
    ):
        run(words("Growing", tmp_path / "run"))


class Remembering(SimCLR):
    """SimCLR whose loss is larger by what the attributes have of earlier steps."""

    def __init__(self, encoder, **arguments) -> None:
        super().__init__(encoder, **arguments)
        self.mean, self.steps, self.past = None, 0, deque(maxlen=3)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def loss(self, views):
        loss = super().loss(views)
        self.steps += 1
        self.scratch += 1
        self.mean = loss.detach() if self.mean is None else self.mean + loss.detach()
        self.past.append(loss.detach().numpy())
        if not hasattr(self, "late"):
            self.late = torch.zeros(1)
        self.late = self.late + 1
        return loss * (self.steps + self.scratch.sum() + self.mean + len(self.past) + self.late.sum())


class Tidy(Remembering):
    """The same, whose attributes begin anew in each training."""

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        self.mean, self.steps, self.past = None, 0, deque(maxlen=3)
        self.scratch.zero_()
        vars(self).pop("late", None)


def test_each_training_begins_with_the_first_attributes(tmp_path) -> None:
    folders = [tmp_path / name for name in ("Remembering", "Tidy")]
    for folder in folders:
        run(words(folder.name, folder, calibration="auxiliary"))
    first, second = (model_bits(folder) for folder in folders)
    assert first == second


def test_first_values_of_every_kind_return() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.weights, self.text = [self.weight], "a"
            self.tensor, self.array, self.number = torch.ones(2), np.ones(2), 3
            self.table, self.queue = {"a": [torch.ones(1)]}, deque([torch.zeros(1)], maxlen=2)
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    network = Foreign()
    unsaved, weights, scratch = UnsavedState(network), network.weights, network.scratch
    network.tensor += 1
    network.array[:] = 5
    network.number, network.text, network.late = None, "b", torch.ones(3)
    network.table["a"].append(torch.ones(2))
    network.queue.extend([torch.ones(1), torch.ones(1)])
    network.scratch.add_(4)
    unsaved.reset()
    assert network.tensor.tolist() == [1, 1]
    assert network.array.tolist() == [1, 1]
    assert (network.number, network.text) == (3, "b")
    assert [len(network.table["a"]), network.table["a"][0].tolist()] == [1, [1]]
    assert [value.tolist() for value in network.queue] == [[0]]
    assert network.queue.maxlen == 2
    assert network.scratch is scratch
    assert scratch.tolist() == [0, 0]
    assert network.weights is weights
    assert not hasattr(network, "late")
    network.queue.append(torch.ones(1))
    unsaved.reset()  # the first values are copies
    assert len(network.queue) == 1


def test_buffers_are_the_same_tensors_after_a_block() -> None:
    norm = nn.BatchNorm1d(2)
    before = norm.running_mean
    with Buffers(norm):
        norm.running_mean = torch.ones(2, dtype=torch.float64)
    assert norm.running_mean is before
    assert before.tolist() == [1, 1]
    with pytest.raises(InputError, match="running_mean of shape .2,. became None"), Buffers(norm):
        norm.running_mean = None
    norm.register_buffer("cached", torch.zeros(2), persistent=False)
    with Buffers(norm):
        norm.cached = torch.zeros(3)
    assert norm.cached.shape == (3,)


class Random(ConvSmall):
    """An encoder with constants that are not saved: random ones, or the same ones each time."""


def random_encoder(*, kind="buffer", **arguments):
    encoder = conv_small(**arguments)
    encoder.__class__ = Random
    value = torch.arange(3.0) if kind == "fixed" else torch.rand(3)
    if kind == "attribute":
        encoder.position = value
    else:
        encoder.register_buffer("position", value, persistent=kind == "saved")
    return encoder


@pytest.mark.parametrize(("kind", "is_refused"), [("buffer", 1), ("attribute", 1), ("fixed", 0), ("saved", 0)])
def test_an_encoder_saves_its_random_constants(tmp_path, kind, is_refused) -> None:
    overrides = [*SMALL, f"encoder._target_={__name__}.random_encoder", f"+encoder.kind={kind}"]
    if not is_refused:
        assert Federation(tmp_path, *overrides).run(1)
        return
    with pytest.raises(InputError, match="position of random_encoder is random and not saved; make it a buffer"):
        Federation(tmp_path, *overrides)
