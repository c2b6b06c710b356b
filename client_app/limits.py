"""Limits of an edge client for server requests, checked before anything is built, allocated or read.

The node configuration's ``limits`` names a file that may set any of them, for example::

    memory: 2.0 # GB, of a message, of the images, and of a training step by estimate
    epochs: 20 # local epochs of a round
    batch: 256 # images of a step
    size: 128 # height and width of an image, in pixels
    threads: 2
    minutes: 15 # of training, per round
    active_hours: 22:00-06:00 # of local time, in which a round may start
    max_rounds_per_day: 10
    only_on_power: true # no round on battery (Linux)
"""

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from client_app.availability import check_hours, check_power, count_round, parse_hours
from fedssl.config.settings import ClientSettings
from fedssl.errors import InputError, RequestRefused
from fedssl.machine.memory import available_memory, gigabytes, grown_memory
from fedssl.methods.base import build_method
from fedssl.untrusted import read_yaml
from fedssl.wire.messages import TrainPlan
from fedssl.wire.wire_format import WEIGHTS

_UNKNOWN_MEMORY = 2.0  # GB, if the system does not report its memory
_SHARE = 0.75  # of the available memory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits, see the module docstring. ``memory`` None is three quarters of the available memory."""

    memory: float | None = None
    epochs: int = 100
    batch: int = 1024
    size: int = 512
    threads: int = 64
    minutes: float = 60.0
    active_hours: str | None = None
    max_rounds_per_day: int | None = None
    only_on_power: bool = False

    def memory_bytes(self) -> int:
        if self.memory is not None:
            return int(self.memory * 1e9)
        available = available_memory(reusable=grown_memory())
        return int(_UNKNOWN_MEMORY * 1e9 if available is None else _SHARE * available)

    def check_start(self, states: Path) -> None:
        """Refuse to start a round now, or count it in the folder of states; raises `RequestRefused`."""
        now = datetime.datetime.now().astimezone()
        if self.active_hours is not None:
            check_hours(parse_hours(self.active_hours), now)
        if self.only_on_power:
            check_power()
        if self.max_rounds_per_day is not None:
            count_round(states, maximum=self.max_rounds_per_day, now=now)

    def make_deadline_check(self) -> Callable[[], None]:
        """Return a function that raises `RequestRefused` once the time for a round is up."""
        end = time.monotonic() + 60 * self.minutes

        def check() -> None:
            if time.monotonic() > end:
                raise RequestRefused(
                    f"training takes longer than the {self.minutes:g} minutes of a round that this device allows; "
                    "lower local_epochs"
                )

        return check


def read_limits(file: Path) -> Limits:
    """Read the file of limits; raises `InputError`."""
    limits = read_yaml(file, dict)
    if limits is None:
        raise InputError(f"limits={file} is not there; name a file with {', '.join(_names())}, or leave limits out")
    for key, value in limits.items():
        if key not in _names():
            raise InputError(f"{file} has {key}, which is no limit; known are {', '.join(_names())}")
        problem = _problem(key, value)
        if problem:
            raise InputError(f"{file} has {key}: {value}; give {problem}")
    return Limits(**limits)


def _problem(key: str, value: Any) -> str:
    """Return what a limit must be; empty if the value is valid."""
    if key == "only_on_power":
        return "" if isinstance(value, bool) else "true or false"
    if key == "active_hours":
        try:
            parse_hours(str(value))
        except ValueError:
            return "a start and an end, such as 22:00-06:00"
        return ""
    whole = key in ("epochs", "batch", "size", "threads", "max_rounds_per_day")
    valid = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return "" if valid else f"a {'whole ' if whole else ''}number above 0"


def check_message(content: RecordDict, limits: Limits) -> None:
    """Refuse a message larger than the allowed memory; raises `RequestRefused`."""
    arrays = [pair for record in content.array_records.values() for pair in record.items()]
    # Quantized weights have one or two bytes, and are decoded to four.
    num_bytes = sum(len(array.data) * (4 if name == WEIGHTS else 1) for name, array in arrays)
    _check("the message brings", num_bytes, limits)


def check_plan(plan: TrainPlan) -> None:
    """Refuse invalid numbers of a plan; raises `RequestRefused`."""
    ranges: dict[str, tuple[float, float, float]] = {
        "round": (plan.round, 1, 10**6),
        "oldest-resumable-round": (plan.oldest_resumable_round, 0, plan.round),
        "lr-factor": (plan.lr_factor, 0, 1000),
        "num-stages": (1 if plan.num_stages is None else plan.num_stages, 1, 256),
        "num-frozen-stages": (plan.num_frozen_stages, 0, plan.num_stages or 0),
        "depth-dropout": (plan.depth_dropout, 0, 1),
        "models to choose from": (1 + len(plan.candidate_arrays), 1, 64),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise RequestRefused(f"{name}={value} of the plan is not from {low} to {high:g}")


def check_settings(settings: ClientSettings, limits: Limits, *, num_images: int) -> None:
    """Refuse training beyond the limits, for ``num_images`` local images; raises `RequestRefused`."""
    training, data = settings.training, settings.data
    asked: dict[str, tuple[Any, float]] = {
        "local_epochs": (training.epochs, limits.epochs),
        "batch_size": (training.batch_size, limits.batch),
        "dataset.size": (data.size, limits.size),
    }
    for name, (value, maximum) in asked.items():
        if value > maximum:
            raise RequestRefused(f"{name}={value} but this device allows {maximum:g} at most")
    for part in (training.augmentation, settings.model.encoder):  # both have settings of the images
        for name, value in (("size", data.size), ("channels", data.channels)):
            if part.values.get(name, value) != value:
                raise RequestRefused(f"{part.name} is for {name}={part.values[name]} but the images have {value}")
    _check("the images take", num_images * data.channels * data.size**2, limits)
    _check("a training step takes about", estimate_step_memory(settings, num_images=num_images), limits)


def estimate_step_memory(settings: ClientSettings, *, num_images: int) -> int:
    """Return an estimate of the memory of a training step, without computing or allocating anything.

    Weights with gradients and two moments of an optimizer; two views of a batch, and the matrices of crop and blur
    along both axes; and the outputs of all modules of the encoder.
    """
    data, batch = settings.data, min(settings.training.batch_size, num_images)
    activations = 0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal activations
        activations += output.nbytes if isinstance(output, Tensor) else 0

    try:
        with torch.device("meta"):
            method = build_method(settings.model)
            for module in method.encoder.modules():
                if not list(module.children()):
                    module.register_forward_hook(count)
            method.encoder(torch.empty(2, data.channels, data.size, data.size))
    except InputError:
        raise
    except Exception as error:  # a user's encoder or method may raise anything
        raise RequestRefused(
            f"the memory of {settings.model.encoder.name} cannot be estimated ({type(error).__name__})"
        ) from error
    weights = sum(tensor.nbytes for tensor in method.named_tensors.values())
    trained = sum(method.named_tensors[name].nbytes for name in method.trainable)
    views = 2 * batch * (data.channels + 4) * data.size**2 * 4
    return weights + 3 * trained + views + batch * activations


def _check(what: str, needed: int, limits: Limits) -> None:
    allowed = limits.memory_bytes()
    if needed > allowed:
        raise RequestRefused(f"{what} {gigabytes(needed)} of memory but this device allows {gigabytes(allowed)}")


def _names() -> list[str]:
    return [field.name for field in fields(Limits)]
