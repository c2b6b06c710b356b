"""An encoder in stages, of which layer-wise training runs and trains some."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Lifetime(NamedTuple):
    """When a layer of an encoder runs and when it is trained.

    It runs if the encoder's depth is from ``first`` to ``last``, and is trained unless ``freezes`` or more stages are
    frozen.
    """

    first: float
    last: float
    freezes: float


@dataclass
class Span:
    """The stages that run: one object for an encoder and all copies of it (online, target, received).

    Attributes
    ----------
    depth : int
        Stages that run, from the first on.
    frozen : int
        Of these the first ones, which are not trained, and with them the stem; 0: all are trained.
    dropout : float
        Depth dropout: share of steps for which a frozen stage is left out, drawn for each stage.
    """

    depth: int
    frozen: int = 0
    dropout: float = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Span":
        return self


class Encoder(nn.Module):
    """Maps pictures ``(batch, channels, size, size)`` to representations h ``(batch, feature_dim)``.

    It is a stem, a sequence of stages and a readout. Layer-wise training (`fedssl.schedule`) runs the first stages
    only (``span.depth``) and trains the last of these (``span.frozen``). Frozen stages are in eval mode and are run by
    `prefix`, once for all networks of a method, and `forward` then takes what that puts out in place of pictures.

    Attributes
    ----------
    feature_dim : int
        Length of a representation.
    stage_names : tuple of str
        The stages' names among the submodules.
    span : Span
        What runs.
    bridges : ModuleDict
        Linear maps of what an earlier stage puts out to representations, for layer-wise training of encoders whose
        stages differ in width; see `add_bridges`.
    even : bool
        Whether every stage takes what any other puts out.
    """

    feature_dim: int
    stage_names: tuple[str, ...] = ()
    span: Span
    bridges: nn.ModuleDict
    even = False

    def divide(self, *, stages: tuple[str, ...], widths: tuple[int, ...], tail: tuple[str, ...] = ()) -> None:
        """Name the stages, the lengths of what `readout` gives behind each, and the modules that belong to it."""
        self.stage_names, self._widths = stages, widths
        self._lifetimes = {name: Lifetime(number, math.inf, number) for number, name in enumerate(stages, start=1)}
        self._lifetimes |= dict.fromkeys(tail, Lifetime(0, math.inf, math.inf))
        self.span = Span(depth=len(stages))
        self.bridges = nn.ModuleDict()

    def stem(self, pictures: Tensor) -> Tensor:
        """What the first stage takes."""
        return pictures

    def readout(self, x: Tensor) -> Tensor:
        """The representation ``(batch, width)`` that a stage's output stands for."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        span = self.span
        if not span.frozen:
            x = self.stem(x)
        for stage in self.stages()[span.frozen : span.depth]:
            x = stage(x)
        h = self.readout(x)
        bridge = str(span.depth)
        return self.bridges[bridge](h) if bridge in self.bridges else h

    def prefix(self, pictures: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """What the stem and the frozen stages make of batches of pictures, each by itself, without gradient.

        Depth dropout leaves the same stages out for all of them.
        """
        stages = self.stages()[: self.span.frozen]
        if self.span.dropout:
            draws = torch.rand(len(stages), generator=generator).tolist()
            stages = [stage for stage, draw in zip(stages, draws, strict=True) if draw >= self.span.dropout]
        with torch.no_grad():
            outputs = [self.stem(batch) for batch in pictures]
            for stage in stages:
                outputs = [stage(x) for x in outputs]
        return outputs

    def train(self, mode: bool = True) -> "Encoder":
        super().train(mode)
        if self.span.frozen:
            for name, module in self.named_modules():
                if self.lifetime(name).freezes <= self.span.frozen:
                    module.training = False  # not eval(), which would concern what is inside as well
        return self

    def stages(self) -> list[nn.Module]:
        """The stages in order."""
        return [self.get_submodule(name) for name in self.stage_names]

    def lifetime(self, name: str) -> Lifetime:
        """When the layer or module ``name`` runs and is trained; what belongs to no stage belongs to the stem."""
        found = (lifetime for module, lifetime in self._lifetimes.items() if f"{name}.".startswith(f"{module}."))
        return next(found, Lifetime(0, math.inf, 1))

    def add_bridges(self) -> None:
        """Make a bridge behind every stage that is narrower than a representation."""
        for number, width in enumerate(self._widths, start=1):
            if width != self.feature_dim:
                self.bridges[str(number)] = nn.Linear(width, self.feature_dim)
                self._lifetimes[f"bridges.{number}"] = Lifetime(number, number, math.inf)
