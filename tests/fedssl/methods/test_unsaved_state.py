"""State of a user's classes outside of the layers: each training begins with its first values."""

import random
from collections import Counter, deque, namedtuple

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from fedssl.augmentation import Augmentation
from fedssl.config.component import Component
from fedssl.encoders.factory import ConvSmall, conv_small
from fedssl.errors import InputError
from fedssl.methods import unsaved_state
from fedssl.methods.simclr import SimCLR
from fedssl.methods.unsaved_state import UnsavedState, check_unsaved
from fedssl.regularizers.base import Regularizer
from simulation.run import run
from tests.federation import Federation
from tests.fedssl.methods.test_saved_buffers import words
from tests.runs import SMALL, model_bits

Pair = namedtuple("Pair", "total number")


class Meter:
    """An object of a user, with attributes."""

    def __init__(self) -> None:
        self.values = []


class Remembering(SimCLR):
    """SimCLR whose loss is larger by what the attributes have of earlier steps."""

    def __init__(self, encoder, **arguments) -> None:
        super().__init__(encoder, **arguments)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.begin()

    def begin(self) -> None:
        self.mean, self.steps, self.past, self.scale = None, 0, deque(maxlen=3), "auto"
        self.float, self.pair, self.table, self.meter = (
            np.float32(0),
            Pair(0.0, 0),
            {"name": "loss", "sum": 0.0},
            Meter(),
        )
        self.generator, self.torch_generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.scratch.zero_()

    def loss(self, views):
        loss = super().loss(views)
        value = float(loss)
        self.steps += 1
        self.scratch += 1
        self.mean = value if self.mean is None else self.mean + value
        self.past.append(loss.detach().numpy())
        self.float = np.float32(0.9) * self.float + np.float32(value)
        self.pair = Pair(self.pair.total + value, self.pair.number + 1)
        self.table["sum"] += value
        self.meter.values.append(value)
        self.scale = value if self.scale == "auto" else self.scale
        self.late = getattr(self, "late", 0) + 1
        drawn = self.generator.random() + torch.rand((), generator=self.torch_generator)
        numbers = [self.float, self.pair.total, self.table["sum"], sum(self.meter.values), self.scale, self.late, drawn]
        return loss * (self.steps + self.scratch.sum() + self.mean + len(self.past) + sum(map(float, numbers)))


class Tidy(Remembering):
    """The same, whose attributes begin anew in each training."""

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        self.begin()
        vars(self).pop("late", None)


@pytest.mark.parametrize("others", [["calibration=auxiliary"], ["strategy=clustered", "strategy.clusters=2"]])
def test_each_training_begins_with_the_first_attributes(tmp_path, others) -> None:
    for target in ("Remembering", "Tidy"):
        run(words(f"{__name__}.{target}", tmp_path / target, *others))
    first, second = (model_bits(tmp_path / target) for target in ("Remembering", "Tidy"))
    assert first == second


class Growing(Regularizer):
    """The loss times the number of steps."""

    def __init__(self) -> None:
        self.steps = 0

    def apply(self, loss, step):
        self.steps += 1
        return loss * self.steps


class TidyGrowing(Growing):
    def on_train_start(self, method) -> None:
        self.steps = 0


def test_a_regularizer_begins_with_the_first_attributes(tmp_path) -> None:
    for target in ("Growing", "TidyGrowing"):
        regularizer = f"regularizer._target_={__name__}.{target}"
        run([*words("fedssl.methods.simclr.SimCLR", tmp_path / target), regularizer])
    assert model_bits(tmp_path / "Growing") == model_bits(tmp_path / "TidyGrowing")


class Adapting(torch.optim.SGD):
    """SGD with state in the options of its groups, as Prodigy, and in an attribute, beginning with a momentum."""

    firsts = ()

    def __init__(self, params, **options) -> None:
        super().__init__(params, **options)
        self.param_groups[0]["k"], self.factors = 0, []

    def step(self, closure=None):
        group = self.param_groups[0]
        if not self.state:  # the first step of a training
            self.firsts.append((group["k"], "d" in group, len(self.factors)))
        group["k"], group["d"] = group["k"] + 1, 0.5
        self.factors.append(group["lr"])
        return super().step(closure)


class Numbering(Augmentation):
    """Views with a counter."""

    firsts, number = (), 0

    def apply(self, images, params, *, layout):
        self.firsts.append(self.number)
        self.number += 1
        return super().apply(images, params, layout=layout)


@pytest.mark.parametrize("others", [[], ["calibration=auxiliary"]])
def test_optimizer_and_augmentation_begin_with_the_first_values(monkeypatch, tmp_path, others) -> None:
    monkeypatch.setattr(Adapting, "firsts", [])
    monkeypatch.setattr(Numbering, "firsts", [])
    own = [f"optimizer._target_={__name__}.Adapting", f"augmentation._target_={__name__}.Numbering"]
    run([*words("fedssl.methods.simclr.SimCLR", tmp_path), *own, *others])
    trainings = 4 + 2 * bool(others)  # two clients and the server, in two rounds
    assert Adapting.firsts == [(0, False, 0)] * trainings
    assert Numbering.firsts.count(0) == trainings
    assert max(Numbering.firsts) > 0


class Head(nn.Module):
    def __init__(self, shared) -> None:
        super().__init__()
        self.shared, self.targets = shared, None


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weights, self.function = [self.weight], len
        self.tensor, self.array, self.warm = torch.ones(2), np.ones(2), True
        self.table, self.count = Counter(a=2), [0]
        self.random, self.head = random.Random(0), Head(self.count)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_first_values_of_every_kind_return() -> None:
    network = Foreign()
    unsaved, scratch, drawn = UnsavedState(network), network.scratch, random.Random(0).random()
    for _ in range(2):  # the first values are copies
        assert network.random.random() == drawn
        network.tensor += 1
        network.array[:] = 5
        network.table["b"] += 1
        network.count[0] += 1
        network.function, network.late, network.head.targets = None, torch.ones(3), torch.ones(1)
        network.scratch = torch.ones(2)
        del network.warm
        unsaved.reset()
        assert (network.tensor.tolist(), network.array.tolist(), network.warm) == ([1, 1], [1, 1], True)
        assert (network.table, network.count, network.head.targets) == (Counter(a=2), [0], None)
        assert network.head.shared is network.count
        assert network.weights[0] is network.weight
        assert network.function is len
        assert network.scratch is scratch
        assert scratch.tolist() == [0, 0]
        assert not hasattr(network, "late")


def test_references_elsewhere_stay_valid() -> None:
    """A hook, a list in a library's object and a view of a weight have the objects of the attributes."""
    network = Foreign()
    network.meter, network.view = Meter(), network.weight.detach()[:1]
    hook, shared = network.meter.values.append, iter([network.count])
    unsaved = UnsavedState(network)
    hook(1)
    network.weight.data.fill_(7)
    network.tensor, tensor = torch.zeros(2), network.tensor
    unsaved.reset()
    hook(2)
    assert network.meter.values == [2]
    assert next(shared) is network.count
    assert (network.weight.tolist(), network.view.tolist()) == ([7, 7], [7])
    assert network.tensor is tensor


def test_modules_and_buffers_that_are_not_registered_begin_anew() -> None:
    network = Foreign()
    network.teacher = [nn.Linear(1, 1)]
    network.register_buffer("center", None)
    first = network.teacher[0].weight.item()
    unsaved = UnsavedState(network)
    network.teacher[0].weight.data.add_(1)
    network.center = torch.ones(1)
    network.register_buffer("late", torch.ones(1))
    unsaved.reset()
    assert network.teacher[0].weight.item() == first
    assert network.center is None
    assert not hasattr(network, "late")


def test_what_cannot_be_copied_stays(tmp_path) -> None:
    network = Foreign()
    network.config = OmegaConf.create({"a": 1, "b": "${a}"})
    OmegaConf.set_readonly(network.config, True)
    network.sparse = torch.eye(2).to_sparse()
    network.map = np.memmap(tmp_path / "map", np.uint8, "w+", shape=(4,))
    network.register_buffer("wide", torch.tensor(1.0).expand(4), persistent=False)
    unsaved, mapped = UnsavedState(network), network.map
    mapped[0] = 1
    unsaved.reset()
    assert network.map is mapped
    assert (mapped[0], network.config.b) == (1, 1)


def test_objects_of_libraries_and_large_arrays_stay(monkeypatch) -> None:
    network, images = Foreign(), np.zeros(100)
    monkeypatch.setattr(unsaved_state, "_MAX_BYTES", 99)
    network.images = [images]
    unsaved = UnsavedState(network)
    network.table, network.compiled = len, print  # a value that became one, and a new one
    unsaved.reset()
    assert (network.table, network.compiled) == (len, print)
    assert network.images[0] is images


class Random(ConvSmall):
    """An encoder with constants that are not saved: random ones, or the same ones each time."""


def random_encoder(*, kind="buffer", **arguments):
    encoder = conv_small(**arguments)
    encoder.__class__ = Random
    if kind == "recurrent":
        encoder.extra = type("Own", (nn.GRU,), {"__module__": __name__})(2, 2)
        return encoder
    if kind == "normalized":
        encoder.extra = nn.utils.weight_norm(nn.Linear(2, 2))
        encoder.extra.__class__ = type("Own", (nn.Linear,), {"__module__": __name__})
        return encoder
    value = torch.rand(3) if kind not in ("fixed", "names") else torch.arange(3.0)
    if kind in ("attribute", "list", "names"):
        encoder.position = [value] if kind == "list" else np.array(["a", None], object) if kind == "names" else value
    else:
        encoder.register_buffer("position", value, persistent=kind == "saved")
    return encoder


@pytest.mark.parametrize("kind", ["buffer", "attribute", "list", "fixed", "saved", "names", "normalized", "recurrent"])
def test_an_encoder_saves_its_random_constants(kind) -> None:
    component = Component(
        {"_target_": f"{__name__}.random_encoder", "kind": kind, "channels": 1, "size": 8, "width": 4}
    )
    encoder = component.instantiate()
    if kind in ("fixed", "saved", "names", "normalized", "recurrent"):
        check_unsaved(component, encoder)
        return
    with pytest.raises(InputError, match=r"^position(\[0\])? of random_encoder is random and not saved; make it a"):
        check_unsaved(component, encoder)


def test_a_run_checks_the_constants_of_its_encoder(tmp_path) -> None:
    with pytest.raises(InputError, match="position of random_encoder is random and not saved"):
        Federation(tmp_path, *SMALL, f"encoder._target_={__name__}.random_encoder")
