"""A method in a stage of its schedule: what of it runs, is trained, travels, and is handed on from stage to stage."""

import logging
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
from torch import Tensor

from fedssl.encoders.base import Lifetime
from fedssl.errors import InputError
from fedssl.layers import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_layers import travelling_names
from fedssl.schedule.phases import Phase, phase_at

log = logging.getLogger("fedssl")

Layer = TypeVar("Layer", np.ndarray, Tensor)

_HEAD = Lifetime(0, float("inf"), float("inf"))


def lifetime(method: SSLMethod, name: str) -> Lifetime:
    """When a layer of the method runs and is trained: always, unless it is one of an encoder."""
    network, _, rest = name.partition(".")
    return method.encoder.lifetime(rest) if network in ("encoder", "target_encoder") else _HEAD


def enter(method: SSLMethod, *, depth: int, frozen: int = 0, dropout: float = 0.0) -> None:
    """Let the first ``depth`` stages of the encoder run, of which the first ``frozen`` are not trained.

    `fedssl.model_layers` then knows only the layers that run, and of those that stay with a client what is trained:
    frozen stages are one and the same for all networks of the method.
    """
    span = method.encoder.span
    if (depth, frozen) != (span.depth, span.frozen):
        span.depth, span.frozen = depth, frozen
        method.frozen = frozen
        lifetimes = {name: lifetime(method, name) for name in method.tensors}
        runs = {name: found.first <= depth <= found.last for name, found in lifetimes.items()}
        trained = {name: runs[name] and frozen < lifetimes[name].freezes for name in lifetimes}
        method.idle = frozenset(
            name for name in lifetimes if not (trained[name] if name.startswith("target_encoder.") else runs[name])
        )
        for name in method.trainable:
            method.tensors[name].requires_grad_(trained[name])
    span.dropout = dropout


def frozen_names(method: SSLMethod) -> list[str]:
    """Names of the layers that a client receives and uses without training them."""
    if not method.frozen:
        return []
    return [name for name in travelling_names(method) if lifetime(method, name).freezes <= method.frozen]


def inherited(
    layers: Mapping[str, Layer], *, before: str, new: str, like: Mapping[str, np.ndarray | Tensor]
) -> dict[str, Layer]:
    """Layers of one stage of the encoder under the names of the next; none if they do not have the shapes of those.

    ``before`` and ``new`` are prefixes of names, ``like`` has the layers of the new stage among others.
    """
    found = {new + name.removeprefix(before): layer for name, layer in layers.items() if name.startswith(before)}
    shapes = {name: layer.shape for name, layer in like.items() if name.startswith(new)}
    return found if {name: layer.shape for name, layer in found.items()} == shapes else {}


class Stages:
    """The stages of a run, applied to the layers of its method.

    Parameters
    ----------
    method : SSLMethod
        Tells which layer belongs to which stage of the encoder.
    schedule : list of Phase
        In order; they cover all rounds.
    """

    def __init__(self, method: SSLMethod, schedule: list[Phase]) -> None:
        self._lifetimes = {name: lifetime(method, name) for name in method.tensors}
        self._names = [f"encoder.{name}." for name in method.encoder.stage_names]
        self._schedule = schedule

    def at(self, round: int) -> Phase:
        """The stage that a round belongs to."""
        return phase_at(self._schedule, round)

    def trained(self, round: int, names: Iterable[str]) -> list[str]:
        """Those of the layers that clients train in a round."""
        stage = self.at(round)
        return [name for name in names if self._runs(name, stage) and stage.frozen < self._lifetimes[name].freezes]

    def frozen(self, round: int, names: Iterable[str]) -> list[str]:
        """Those of the layers that clients use in a round without training them."""
        stage = self.at(round)
        return [name for name in names if self._runs(name, stage) and stage.frozen >= self._lifetimes[name].freezes]

    def begin(self, round: int, layers: Layers) -> Layers:
        """The global layers with which a round begins: in the first one of a stage, weights are handed on.

        Only a stage of the encoder whose layers have the shapes of those before takes them over; the stages of a
        ResNet do not.
        """
        stage = self.at(round)
        if not stage.transfer or stage.number == 1 or round != stage.first:
            return layers
        before, new = self._names[stage.depth - 2], self._names[stage.depth - 1]
        source = inherited(layers, before=before, new=new, like=layers)
        if not source:
            log.info("stage %d does not begin with the weights of the one before: shapes differ", stage.depth)
            return layers
        return {**layers, **{name: array.copy() for name, array in source.items()}}

    def _runs(self, name: str, stage: Phase) -> bool:
        found = self._lifetimes[name]
        return found.first <= stage.depth <= found.last


def check(method: SSLMethod, schedule: list[Phase]) -> None:
    """Refuse depth dropout where leaving out a stage changes what the next one takes; raises `InputError`."""
    if any(stage.dropout for stage in schedule) and not method.encoder.even:
        raise InputError(
            "schedule.depth_dropout leaves out stages of the encoder, which only a vision transformer allows; "
            "set encoder=vit_tiny or schedule.depth_dropout=0"
        )
