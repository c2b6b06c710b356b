"""A method in a phase of its schedule: what of it runs, is trained, travels, and is handed on from stage to stage."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fedssl.arrays import Layers
from fedssl.encoders.base import StageRange
from fedssl.errors import InputError
from fedssl.methods.base import TEACHER, SSLMethod
from fedssl.model_arrays import exchanged_names
from fedssl.schedule.phases import Phase

log = logging.getLogger("fedssl")

TARGET_ENCODER = "target_encoder."  # how the names of its layers begin

_HEAD = StageRange(0, float("inf"), float("inf"))


def stage_range(method: SSLMethod, name: str) -> StageRange:
    """When a layer of the method runs and is trained: always, unless it is one of an encoder."""
    network, _, rest = name.partition(".")
    return method.encoder.stage_range(rest) if network in ("encoder", "target_encoder") else _HEAD


@contextmanager
def set_active_stages(
    method: SSLMethod, *, depth: int | None, frozen: int = 0, depth_dropout: float = 0.0
) -> Iterator[None]:
    """Let only some stages of the encoder run, and be trained, inside the block; after it all is as before.

    Meanwhile `fedssl.model_arrays` names running layers only. Of target networks it names the trained stages only,
    because all networks of a method share the frozen ones.

    Parameters
    ----------
    depth : int or None
        How many stages run; None: nothing changes, whatever the other arguments are.
    frozen : int
        How many of these, from the first on, are not trained.
    depth_dropout : float
        Depth dropout, see `fedssl.schedule.phases.Phase`.
    """
    if depth is None:
        yield
        return
    active = method.encoder.active_stages
    before = replace(active)
    frozen_before, idle = method.frozen, method.inactive_names
    trained = {name: method.named_tensors[name].requires_grad for name in method.trainable}
    _enter(method, depth, frozen, depth_dropout)
    try:
        yield
    finally:
        active.depth, active.frozen, active.depth_dropout = before.depth, before.frozen, before.depth_dropout
        method.frozen, method.inactive_names = frozen_before, idle
        for name, was in trained.items():
            method.named_tensors[name].requires_grad_(was)


def frozen_names(method: SSLMethod) -> list[str]:
    """Names of the layers that a client receives and uses without training them."""
    if not method.frozen:
        return []
    return [name for name in exchanged_names(method) if stage_range(method, name).frozen_from <= method.frozen]


class Stages:
    """The stages of a method's encoder by the names of their layers.

    Parameters
    ----------
    method : SSLMethod
        Tells which layer belongs to which stage of the encoder.
    """

    def __init__(self, method: SSLMethod) -> None:
        self._stage_ranges = {name: stage_range(method, name) for name in method.named_tensors}
        self._names = [f"encoder.{name}." for name in method.encoder.stage_names]
        self._averages_target = method.target_mode == "average"

    def trained(self, phase: Phase, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the layers that clients train."""
        return tuple(
            name for name in self._running(phase, names) if phase.frozen < self._stage_ranges[name].frozen_from
        )

    def frozen(self, phase: Phase, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the layers that clients use without training them."""
        return tuple(
            name
            for name in self._running(phase, names)
            if phase.frozen >= self._stage_ranges[name].frozen_from and not name.startswith(TARGET_ENCODER)
        )

    def transfer_weights(self, layers: Layers, phase: Phase) -> Layers:
        """The layers with which a phase begins: its newest stage takes over the weights of the stage before.

        Only a stage whose layers have the shapes of those before takes them over; the stages of a ResNet do not. Target
        networks that travel begin as copies of the online ones.
        """
        if phase.number == 1:
            return layers
        layers = self._transfer(layers, phase) if phase.weight_transfer else layers
        if not self._averages_target:
            return layers
        targets = [name for name in layers if name.startswith("target_")]
        return {**layers, **{name: layers[name.removeprefix("target_")].copy() for name in targets}}

    def _transfer(self, layers: Layers, phase: Phase) -> Layers:
        before, new = self._names[phase.depth - 2], self._names[phase.depth - 1]
        found = {new + name.removeprefix(before): array for name, array in layers.items() if name.startswith(before)}
        shapes = {name: array.shape for name, array in layers.items() if name.startswith(new)}
        if {name: array.shape for name, array in found.items()} != shapes:
            log.info("stage %d does not begin with the weights of the one before: shapes differ", phase.depth)
            return layers
        return {**layers, **{name: array.copy() for name, array in found.items()}}

    def _running(self, phase: Phase, names: Iterable[str]) -> Iterator[str]:
        return (name for name in names if _runs(self._stage_ranges[name], phase.depth))


def check(method: SSLMethod, phases: Sequence[Phase]) -> None:
    """Refuse what the method or its encoder cannot do.

    Raises
    ------
    InputError
        Depth dropout where leaving out a stage changes what the next one takes; a teacher, which is a whole encoder,
        where the encoder grows.
    """
    if TEACHER in method.static_parts and len(phases) > 1:
        raise InputError(
            "a teacher knows what the whole encoder makes of images, and the schedule trains parts of it; set "
            "schedule=end_to_end, or leave the teacher out with method.alignment_weight=0"
        )
    if any(phase.depth_dropout for phase in phases) and not method.encoder.stages_interchangeable:
        raise InputError(
            "schedule.depth_dropout leaves out stages of the encoder, which only a vision transformer allows; "
            "set encoder=vit_tiny or schedule.depth_dropout=0"
        )


def _enter(method: SSLMethod, depth: int, frozen: int, depth_dropout: float) -> None:
    active = method.encoder.active_stages
    active.depth, active.frozen, active.depth_dropout = depth, frozen, depth_dropout
    method.frozen = frozen
    stage_ranges = {name: stage_range(method, name) for name in method.named_tensors}
    runs = {name: _runs(found, depth) for name, found in stage_ranges.items()}
    trained = {name: runs[name] and frozen < found.frozen_from for name, found in stage_ranges.items()}
    method.inactive_names = frozenset(
        name for name in stage_ranges if not (trained[name] if name.startswith(TARGET_ENCODER) else runs[name])
    )
    for name in method.trainable:
        method.named_tensors[name].requires_grad_(trained[name])


def _runs(stage_range: StageRange, depth: int) -> bool:
    return stage_range.first <= depth <= stage_range.last
