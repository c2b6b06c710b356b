"""A method in a phase of its schedule: layers that run, are trained, exchanged, and transferred to new stages."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from fedssl.arrays import Layers
from fedssl.encoders.base import ActiveStages, StageRange
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.methods.base import TEACHER, SSLMethod
from fedssl.model_arrays import exchanged_names
from fedssl.schedule.phases import Phase

TARGET_ENCODER = "target_encoder."  # prefix of its layer names

_HEAD = StageRange(0, float("inf"), float("inf"))


def stage_range(method: SSLMethod, name: str) -> StageRange:
    """Return the stage range of a layer of the method; layers outside of encoders always run and are trained."""
    network, _, rest = name.partition(".")
    return method.encoder.stage_range(rest) if network in ("encoder", "target_encoder") else _HEAD


@contextmanager
def set_active_stages(
    method: SSLMethod, *, depth: int | None, frozen: int = 0, depth_dropout: float = 0.0
) -> Iterator[None]:
    """Run and train only some stages of the encoder inside the block, and restore the previous state after it.

    The first ``depth`` stages run, of which the first ``frozen`` are not trained; depth None changes nothing. For
    ``depth_dropout`` see `fedssl.schedule.phases.Phase`. Inside the block `fedssl.model_arrays` lists running layers
    only. Of target networks it lists the trained stages only, because all networks of a method share the frozen ones.
    """
    if depth is None:
        yield
        return
    before = method.frozen, method.inactive_names
    trained_before = {name: method.named_tensors[name].requires_grad for name in method.trainable}
    with method.encoder.run_stages(ActiveStages(depth, frozen, depth_dropout)):
        _mark_layers(method, depth, frozen)
        try:
            yield
        finally:
            method.frozen, method.inactive_names = before
            for name, trained in trained_before.items():
                method.named_tensors[name].requires_grad_(trained)


def frozen_names(method: SSLMethod) -> list[str]:
    """Return the names of the layers that a client downloads and uses without training them."""
    if not method.frozen:
        return []
    return [name for name in exchanged_names(method) if stage_range(method, name).frozen_from <= method.frozen]


class Stages:
    """The encoder stages of a method as sets of layer names."""

    def __init__(self, method: SSLMethod) -> None:
        self._stage_ranges = {name: stage_range(method, name) for name in method.named_tensors}
        self._names = [f"encoder.{name}." for name in method.encoder.stage_names]
        self._averages_target = method.target_init == "average"
        self._merged = frozenset(method.server_merged_names)

    def trained(self, phase: Phase, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of the layers that clients train."""
        return tuple(
            name
            for name in self._running(phase, names)
            if phase.frozen < self._stage_ranges[name].frozen_from and name not in self._merged
        )

    def frozen(self, phase: Phase, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of the layers that clients use without training them."""
        return tuple(
            name
            for name in self._running(phase, names)
            if (phase.frozen >= self._stage_ranges[name].frozen_from and not name.startswith(TARGET_ENCODER))
            or name in self._merged
        )

    def transfer_weights(self, layers: Layers, phase: Phase) -> Layers:
        """Return the layers with which a phase starts; its newest stage copies the weights of the previous stage.

        Weights are copied only if the layers of both stages have equal shapes, which is not the case in a ResNet.
        Exchanged target networks start as copies of the online ones.
        """
        if phase.number == 1:
            return layers
        layers = self._transfer(layers, phase) if phase.weight_transfer else layers
        if not self._averages_target:
            return layers
        targets = [name for name in layers if name.startswith("target_")]
        return {**layers, **{name: layers[name.removeprefix("target_")].copy() for name in targets}}

    def _transfer(self, layers: Layers, phase: Phase) -> Layers:
        copied = copy_stage(layers, self._names[phase.depth - 2], self._names[phase.depth - 1])
        if copied is None:
            log.info("stage %d does not start with the weights of the previous stage: shapes differ", phase.depth)
        return {**layers, **(copied or {})}

    def _running(self, phase: Phase, names: Iterable[str]) -> Iterator[str]:
        return (name for name in names if _runs(self._stage_ranges[name], phase.depth))


def copy_stage(layers: Layers, before: str, new: str) -> Layers | None:
    """Return the layers under the prefix ``new`` with copied weights of those under ``before``.

    Return None if the layers of both have different names or shapes.
    """
    copied = {new + name.removeprefix(before): array for name, array in layers.items() if name.startswith(before)}
    shapes = {name: array.shape for name, array in layers.items() if name.startswith(new)}
    if {name: array.shape for name, array in copied.items()} != shapes:
        return None
    return {name: array.copy() for name, array in copied.items()}


def check_phases(method: SSLMethod, phases: Sequence[Phase]) -> None:
    """Reject phases that the method or its encoder does not support."""
    parts_trained = len(phases) > 1 or phases[0].frozen > 0
    if TEACHER in method.static_parts and method.teacher_sees_views and parts_trained:
        raise InputError(
            "the schedule or the tuning trains parts of the encoder but the teacher is a whole encoder; set "
            "schedule=end_to_end and tuning=full, norm, bias, lora or adapter with tuning.blocks=null, or disable the "
            "teacher with method.alignment_weight=0"
        )
    if method.masks_patches and any(phase.frozen for phase in phases):
        raise InputError(
            f"the schedule or the tuning freezes stages of the encoder, but {type(method).__name__} hides patches, and "
            "frozen stages would run on all of them; set schedule=end_to_end or schedule=progressive, and tuning=full, "
            "norm, bias, lora or adapter with tuning.blocks=null"
        )
    if any(phase.depth_dropout for phase in phases) and not method.encoder.stages_interchangeable:
        raise InputError(
            "schedule.depth_dropout skips stages of the encoder, which only a vision transformer supports; "
            "set encoder=vit_tiny or schedule.depth_dropout=0"
        )


def _mark_layers(method: SSLMethod, depth: int, frozen: int) -> None:
    method.frozen = frozen
    ranges = {name: stage_range(method, name) for name in method.named_tensors}
    runs = {name: _runs(layer_range, depth) for name, layer_range in ranges.items()}
    trained = {name: runs[name] and frozen < layer_range.frozen_from for name, layer_range in ranges.items()}
    method.inactive_names = frozenset(
        name for name in ranges if not (trained[name] if name.startswith(TARGET_ENCODER) else runs[name])
    )
    for name in method.trainable:
        method.named_tensors[name].requires_grad_(trained[name])


def _runs(stage_range: StageRange, depth: int) -> bool:
    return stage_range.first <= depth <= stage_range.last
