"""An encoder in stages, of which layer-wise training runs and trains some."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedssl.errors import InputError


class StageRange(NamedTuple):
    """When a layer of an encoder runs and when it is trained.

    It runs if the encoder's depth is from ``first`` to ``last``, and is trained unless ``frozen_from`` or more stages are
    frozen.
    """

    first: float
    last: float
    frozen_from: float


@dataclass
class ActiveStages:
    """The stages that run: one object for an encoder and all copies of it (online, target, received).

    Attributes
    ----------
    depth : int
        Stages that run, from the first on.
    frozen : int
        Of these the first ones, which are not trained, and with them the stem; 0: all are trained.
    depth_dropout : float
        Depth dropout: share of steps for which a frozen stage is left out, drawn for each stage.
    """

    depth: int
    frozen: int = 0
    depth_dropout: float = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "ActiveStages":
        """Return the same object, for a copy of an encoder to share."""
        return self


class Encoder(nn.Module):
    """Maps images ``(batch, channels, size, size)`` to representations h ``(batch, feature_dim)``.

    It is a stem, a sequence of stages and a readout. Layer-wise training (`fedssl.schedule`) runs the first stages
    only (``active_stages.depth``) and trains the last of these (``active_stages.frozen``). Frozen stages are in eval mode and are run by
    `forward_frozen`, once for all networks of a method, and `forward` then takes the output of `forward_frozen` in place of images.

    Attributes
    ----------
    feature_dim : int
        Length of a representation.
    channels : int or None
        Channels of the images that it takes; None: not known before the stem runs.
    image_size : int or None
        Height and width in pixels of the images that it takes; None: any.
    patch_embedding : str or None
        Name of the submodule that makes a token of every patch of an image; None: there is none.
    stage_names : tuple of str
        The stages' names among the submodules.
    active_stages : ActiveStages
        The stages that run and those that are trained.
    bridges : ModuleDict
        Linear maps from the output of an earlier stage to representations, for layer-wise training of encoders whose
        stages differ in width; see `add_bridges`.
    stages_interchangeable : bool
        Whether every stage takes the output of any other.
    return_feature_map : bool
        Whether `forward` gives the last stage's output, flattened, and not what `pool` makes of it. Protocols of
        evaluation set it, on a copy.
    """

    feature_dim: int
    channels: int | None = None
    image_size: int | None = None
    patch_embedding: str | None = None
    stage_names: tuple[str, ...] = ()
    active_stages: ActiveStages
    bridges: nn.ModuleDict
    stages_interchangeable = False
    return_feature_map = False

    def define_stages(self, *, stages: tuple[str, ...], widths: tuple[int, ...], tail: tuple[str, ...] = ()) -> None:
        """Divide the submodules into stages.

        Parameters
        ----------
        stages : tuple of str
            Names of the submodules that are the stages, in order.
        widths : tuple of int
            Length of the output of `pool` behind each stage.
        tail : tuple of str
            Names of the submodules that belong to `pool`.
        """
        self.stage_names, self._widths = stages, widths
        self._stage_ranges = {name: StageRange(number, math.inf, number) for number, name in enumerate(stages, start=1)}
        self._stage_ranges |= dict.fromkeys(tail, StageRange(0, math.inf, math.inf))
        self.active_stages = ActiveStages(depth=len(stages))
        self.bridges = nn.ModuleDict()

    def check_image_shape(self, shape: Sequence[int]) -> None:
        """Refuse images of another form than the encoder was built for.

        Parameters
        ----------
        shape : sequence of int
            ``(..., channels, height, width)``.

        Raises
        ------
        InputError
            If the encoder does not take such images.
        """
        channels, height, width = shape[-3:]
        if self.channels not in (None, channels):
            raise InputError(
                f"encoder.channels={self.channels} but the images have {channels} channels; "
                f"leave encoder.channels to follow dataset.channels, or give images with {self.channels}"
            )
        if self.image_size is not None and (height, width) != (self.image_size, self.image_size):
            raise InputError(
                f"encoder.size={self.image_size} but the images have {height}x{width} pixels; leave encoder.size to "
                f"follow dataset.size, or give images of {self.image_size}x{self.image_size}"
            )

    def stem(self, images: Tensor) -> Tensor:
        """Input of the first stage."""
        return images

    def pool(self, x: Tensor) -> Tensor:
        """Representation ``(batch, width)`` made from a stage's output ``x``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Representations ``(batch, feature_dim)`` of images, or of the output of `forward_frozen` if stages are frozen."""
        active = self.active_stages
        if not active.frozen:
            self.check_image_shape(x.shape)
            x = self.stem(x)
        for stage in self.stages()[active.frozen : active.depth]:
            x = stage(x)
        if self.return_feature_map:
            return x.flatten(1)
        h = self.pool(x)
        bridge = str(active.depth)
        return self.bridges[bridge](h) if bridge in self.bridges else h

    def forward_frozen(self, images: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """Run the stem and the frozen stages on batches of images, each by itself, without gradient.

        Depth dropout leaves the same stages out for all batches.

        Parameters
        ----------
        images : sequence of Tensor
            Batches ``(batch, channels, size, size)``.
        generator : torch.Generator
            CPU generator of depth dropout.

        Returns
        -------
        list of Tensor
            Input of the first stage that is trained, for each batch.
        """
        stages = self.stages()[: self.active_stages.frozen]
        if self.active_stages.depth_dropout:
            draws = torch.rand(len(stages), generator=generator).tolist()
            stages = [
                stage for stage, draw in zip(stages, draws, strict=True) if draw >= self.active_stages.depth_dropout
            ]
        for batch in images:
            self.check_image_shape(batch.shape)
        with torch.no_grad():
            outputs = [self.stem(batch) for batch in images]
            for stage in stages:
                outputs = [stage(x) for x in outputs]
        return outputs

    def train(self, mode: bool = True) -> "Encoder":
        """Set training mode; frozen stages are in eval mode whatever ``mode`` says."""
        super().train(mode)
        if self.active_stages.frozen:
            for name, module in self.named_modules():
                if self.stage_range(name).frozen_from <= self.active_stages.frozen:
                    module.training = False  # not eval(), which would concern the modules inside as well
        return self

    def stages(self) -> list[nn.Module]:
        """Submodules that are the stages, in order."""
        return [self.get_submodule(name) for name in self.stage_names]

    def stage_range(self, name: str) -> StageRange:
        """Range of stages of the layer or module ``name``; one that belongs to no stage belongs to the stem."""
        found = (
            stage_range for module, stage_range in self._stage_ranges.items() if f"{name}.".startswith(f"{module}.")
        )
        return next(found, StageRange(0, math.inf, 1))

    def add_bridges(self) -> None:
        """Make a bridge behind every stage that is narrower than a representation."""
        for number, width in enumerate(self._widths, start=1):
            if width != self.feature_dim:
                self.bridges[str(number)] = nn.Linear(width, self.feature_dim)
                self._stage_ranges[f"bridges.{number}"] = StageRange(number, number, math.inf)
