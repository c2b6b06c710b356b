"""Networks of timm and torchvision without their classifier as encoders.

``state_dict`` has the library's names, so weights can be exchanged. A network is divided into a stem, stages and a head
if its family is known (`Parts`); otherwise it has a single stage. Nothing is downloaded. This module imports neither
library: `fedssl.encoders.timm_networks` and `fedssl.encoders.torchvision_networks` do.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.encoders.base import Encoder, StageRange
from fedssl.errors import InputError, reason_of
from fedssl.machine.meta_device import shapes_only

_WHOLE = ""  # name of the only stage of a network whose family is unknown

Part = Callable[[Any, Tensor], Tensor]  # maps a network and the previous part's output to its output


def require_timm(feature: str) -> None:
    """Raise an `InputError` if timm is not installed; ``feature`` needs it."""
    if find_spec("timm") is None:
        raise InputError(f"{feature} needs timm; install it: uv sync --extra timm, or pip install timm")


def run_modules(*names: str) -> Part:
    """Return the part that runs these submodules of a network one after the other."""

    def run(network: nn.Module, x: Tensor) -> Tensor:
        for name in names:
            x = network.get_submodule(name)(x)
        return x

    return run


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Division of a network: ``head(stages(stem(images)))`` is the network without its classifier."""

    stem: Part
    stages: tuple[str, ...]  # names of submodules
    head: Part  # from the last stage's output to the representation
    tail: tuple[str, ...] = ()  # names of the modules with weights in ``head``
    # Whether ``head`` maps the output of every stage, as in a transformer. Otherwise the representation after an
    # earlier stage is the average over positions.
    any_stage: bool = False
    patch_embedding: str | None = None  # name of the submodule that maps patches to tokens
    num_prefix_tokens: int = 0  # see `Encoder`
    # Smaller training views are valid if their side is a multiple of this number of pixels; None: they are not.
    view_step: int | None = None


Create = Callable[[str, int, int], nn.Module]  # builds a network without classifier, of a name, channels and image size
Divide = Callable[[Any], Parts | None]  # returns the parts of a network; None if its family is unknown


class LibraryEncoder(Encoder):
    """A network of another library, whose parameters, buffers and submodules are the encoder's, with their names.

    The network has no classifier: it maps ``(batch, channels, size, size)`` to ``(batch, feature_dim)``. ``parts`` are
    its division; None: the network is the only stage. ``widths`` and ``features`` are the lengths of a representation
    after each stage, and the channels or token lengths of the stages' outputs. ``name`` is the setting
    ``encoder.name``, for error messages.
    """

    def __init__(
        self,
        network: nn.Module,
        parts: Parts | None,
        *,
        widths: Sequence[int],
        features: Sequence[int],
        channels: int,
        image_size: int | None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        # The same dictionaries, so that both see every replaced tensor or module. The network is not a submodule, which
        # would prefix all names.
        self._parameters, self._buffers, self._modules = network._parameters, network._buffers, network._modules
        self._non_persistent_buffers_set = network._non_persistent_buffers_set
        self.__dict__["_network"] = network
        self._parts = parts
        self.feature_dim, self.channels, self.image_size = widths[-1], channels, image_size
        if name is not None:
            self.label = f"encoder.name={name}"
        self.define_stages(
            stages=(_WHOLE,) if parts is None else parts.stages, widths=tuple(widths), features=tuple(features)
        )
        if parts is not None:
            first = 0 if parts.any_stage else len(parts.stages)
            tail = StageRange(first, float("inf"), float("inf"))
            self._stage_ranges |= dict.fromkeys(parts.tail, tail)
            self.patch_embedding = parts.patch_embedding
            self.num_prefix_tokens = parts.num_prefix_tokens
            self.stages_interchangeable = parts.any_stage

    def get_submodule(self, target: str) -> nn.Module:
        """Return the submodule of this name; "" is the network."""
        network: nn.Module = self.__dict__["_network"]
        return network.get_submodule(target)

    def run_stem(self, images: Tensor) -> Tensor:
        return images if self._parts is None else self._parts.stem(self.get_submodule(""), images)

    def pool(self, x: Tensor) -> Tensor:
        if self._parts is None:
            return x
        if self.active_stages.depth < len(self.stage_names) and not self._parts.any_stage:
            return x.mean(dim=(2, 3))
        return self._parts.head(self.get_submodule(""), x)

    @property
    def view_step(self) -> int | None:
        return None if self._parts is None else self._parts.view_step

    def check_view_shape(self, shape: Sequence[int]) -> None:
        """Accept also smaller squares whose side is a multiple of ``view_step``."""
        channels, height, width = shape[-3:]
        step = self.view_step
        if step and self.image_size and height == width < self.image_size and height % step == 0:
            self.check_image_shape((channels, self.image_size, self.image_size))
        else:
            self.check_image_shape(shape)

    def train(self, mode: bool = True) -> "LibraryEncoder":
        """Set training mode; frozen stages stay in eval mode."""
        super().train(mode)
        self.get_submodule("").training = self.training
        return self


def build_library_encoder(
    create: Create, divide: Divide, *, name: str, channels: int, size: int, fixed_size: bool
) -> LibraryEncoder:
    """Build a library's network as an encoder, after checking that it accepts images of this shape.

    ``fixed_size``: whether it accepts no images of another size.
    """
    widths, features = _check_network(create, divide, name, channels, size)
    network = create(name, channels, size)
    return LibraryEncoder(
        network,
        divide(network),
        widths=widths,
        features=features,
        channels=channels,
        image_size=size if fixed_size else None,
        name=name,
    )


@functools.lru_cache(maxsize=64)
def _check_network(create: Create, divide: Divide, name: str, channels: int, size: int) -> tuple[list[int], list[int]]:
    """Return the lengths of `_stage_lengths`, computed without memory; `InputError` if the network does not run."""
    try:
        with shapes_only():
            probe = create(name, channels, size)
            return _stage_lengths(probe, divide(probe), torch.empty(2, channels, size, size))
    except Exception as error:  # a library may reject a shape in any way
        raise InputError(
            f"encoder.name={name} cannot encode images of {channels} x {size} x {size} ({reason_of(error)}); set "
            "dataset.size to a size that it supports, such as 224, or choose another encoder"
        ) from error


def _stage_lengths(network: Any, parts: Parts | None, images: Tensor) -> tuple[list[int], list[int]]:
    """Return the length of the representation after each stage, and the channels or token length of its output.

    Raise an exception if the network does not run.
    """
    x = network(images)  # in training mode, in which some networks have further outputs
    if not isinstance(x, Tensor) or x.ndim != 2:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"its output is {shape} instead of one vector per image")
    feature_dim = x.shape[1]
    if parts is None:
        return [feature_dim], [feature_dim]
    outputs = [parts.stem(network, images)]
    if parts.any_stage:  # of tokens, whose length no stage changes
        return [feature_dim] * len(parts.stages), [outputs[0].shape[-1]] * len(parts.stages)
    for name in parts.stages:
        outputs.append(network.get_submodule(name)(outputs[-1]))
    features = [output.shape[1] for output in outputs[1:]]
    return [*features[:-1], feature_dim], features
