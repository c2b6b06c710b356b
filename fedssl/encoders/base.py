"""Base class of encoders: a sequence of stages, of which layer-wise training runs and trains a part."""

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.low_rank_products import LowRankLayer

Network = TypeVar("Network", bound=nn.Module)


class StageRange(NamedTuple):
    """Depths at which a layer of an encoder runs and is trained.

    It runs at depths from ``first`` to ``last`` and is trained unless ``frozen_from`` or more stages are frozen.
    """

    first: float
    last: float
    frozen_from: float


@dataclass(frozen=True)
class ActiveStages:
    """Stages of an encoder that run, and that are trained."""

    depth: int  # number of stages that run, counted from the first
    frozen: int = 0  # number of these that are frozen, from the first, together with the stem; 0: all are trained
    depth_dropout: float = 0.0  # probability that a frozen stage is skipped in a step, drawn for each stage


class Adapter(nn.Module):
    """Residual bottleneck h + up(gelu(down(h))) of the features at each position (Houlsby et al., arXiv 1902.00751).

    It stands between stages of an encoder, without normalization. ``features`` is the length of a vector h: the
    channels of a feature map, or the length of a token. ``bottleneck`` is that of ``down``'s output.

    ``up`` starts as zero, so that the output is h at first. ``down`` is drawn as `torch.nn.Linear`. GELU has
    gradients where ReLU has none: after stages that end with ReLU, up to half of the hidden units of adapters with ReLU
    were 0 for 200 digits (untrained ``conv_small``).
    """

    def __init__(self, features: int, *, bottleneck: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, bottleneck)
        self.up = nn.Linear(bottleneck, features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shape of ``x``: ``(batch, features, height, width)``, or any shape that ends in ``features``."""
        return x + _linear(F.gelu(_linear(x, self.down)), self.up)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply a linear layer to the channels of feature maps, as a 1x1 convolution, or to the last axis."""
    if x.ndim == 4:
        return F.conv2d(x, layer.weight[:, :, None, None], layer.bias)
    return F.linear(x, layer.weight, layer.bias)


class _StageState:
    """Current stages of an encoder and of its copies by `frozen_copy`; only `Encoder.run_stages` changes them."""

    def __init__(self, active: ActiveStages) -> None:
        self.active = active


class Encoder(nn.Module):
    """Maps images ``(batch, channels, size, size)`` to representations h ``(batch, feature_dim)``.

    An encoder is a stem, a sequence of stages and a pooling. Layer-wise training (`fedssl.schedule`) runs the first
    stages (``active_stages.depth``) and trains the last of these (``active_stages.frozen``). Frozen stages are in eval
    mode. `forward_frozen` runs them once for all networks of a method, and `forward` then expects its output instead of
    images.
    """

    feature_dim: int  # length of a representation
    channels: int | None = None  # of valid images; None if any number is valid
    image_size: int | None = None  # height and width of valid images in pixels; None if any size is valid
    label: str = "the encoder"  # for error messages
    patch_embedding: str | None = None  # name of the submodule that maps patches to tokens; None if there is none
    num_prefix_tokens: int = 0  # of tokens before those of patches in the output of a stage: class token and registers
    stage_names: tuple[str, ...] = ()  # names of the stages among the submodules
    # Linear maps from the output of earlier stages to representations, for layer-wise training of encoders whose stages
    # differ in width; see `add_bridges`.
    bridges: nn.ModuleDict
    adapters: nn.ModuleDict  # after stages, by the number of the stage, counted from 1; see `add_adapters`
    stages_interchangeable: bool = False  # whether each stage accepts the output of any other
    base_names: frozenset[str] = frozenset()  # layers that no client trains, see `freeze_base`
    low_rank_layers: tuple[LowRankLayer, ...] = ()  # names of the factors that the tuning added (`fedssl.tuning.lora`)
    # Those of the base layers that the server changes, see `fedssl.methods.base.SSLMethod.server_merged_names`.
    server_merged_names: frozenset[str] = frozenset()
    # Number of stages, from the first, that only have base layers and run once for all networks of a method.
    frozen_stages: int = 0
    # Whether `forward` returns the flattened output of the last stage instead of the output of `pool`. Evaluation
    # protocols set it, on a copy.
    return_feature_map: bool = False
    # Whether `forward` accepts smaller views in eval mode too. Encoders of methods do: diagnostics, collapse metrics
    # and copies in eval mode encode views.
    accepts_views: bool = False

    def define_stages(
        self,
        *,
        stages: tuple[str, ...],
        widths: tuple[int, ...],
        features: tuple[int, ...] | None = None,
        tail: tuple[str, ...] = (),
    ) -> None:
        """Declare submodules as stages, with lengths of `pool`'s output after each, or as part of `pool` (``tail``).

        ``features`` are the channels or token lengths of the stages' outputs, which adapters need; None: the widths.
        """
        self.stage_names, self._widths, self._features = stages, widths, widths if features is None else features
        self._stage_ranges = {name: StageRange(number, math.inf, number) for number, name in enumerate(stages, start=1)}
        self._stage_ranges |= dict.fromkeys(tail, StageRange(0, math.inf, math.inf))
        self._stage_state = _StageState(ActiveStages(depth=len(stages)))
        self.bridges, self.adapters = nn.ModuleDict(), nn.ModuleDict()

    @property
    def active_stages(self) -> ActiveStages:
        """Stages that run, and stages that are trained; `run_stages` changes them."""
        return self._stage_state.active

    @contextmanager
    def run_stages(self, active: ActiveStages) -> Iterator[None]:
        """Run these stages inside the block, also in copies by `frozen_copy`, and the previous ones after it."""
        before, self._stage_state.active = self._stage_state.active, active
        try:
            yield
        finally:
            self._stage_state.active = before

    def check_image_shape(self, shape: Sequence[int]) -> None:
        """Reject images ``(..., channels, height, width)`` of another shape than that of the encoder's images."""
        channels, height, width = shape[-3:]
        if self.channels not in (None, channels):
            raise InputError(
                f"encoder.channels={self.channels} but the images have {channels} channels; "
                f"leave encoder.channels at its default, or use images with {self.channels} channels"
            )
        if self.image_size is not None and (height, width) != (self.image_size, self.image_size):
            raise InputError(
                f"encoder.size={self.image_size} but the images have {height}x{width} pixels; leave encoder.size "
                f"at its default, or use images of {self.image_size}x{self.image_size}"
            )

    @property
    def view_step(self) -> int | None:
        """Return the number of pixels of which the side of a smaller view is a multiple; None if no view is smaller."""
        return None

    def check_view_shape(self, shape: Sequence[int]) -> None:
        """Reject views ``(..., channels, height, width)`` that `forward` accepts in no mode.

        In eval mode and without ``accepts_views`` images must pass `check_image_shape`, so that no saved encoder is
        evaluated or used on images of a size that it was not built for.
        """
        self.check_image_shape(shape)

    def run_stem(self, images: Tensor) -> Tensor:
        """Return the input of the first stage."""
        return images

    def pool(self, x: Tensor) -> Tensor:
        """Return the representation ``(batch, width)`` of a stage's output ``x``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return representations ``(batch, feature_dim)`` of images, or of the output of the frozen stages, if any."""
        active = self.active_stages
        if not active.frozen:
            takes_views = self.training or self.accepts_views
            check_shape = self.check_view_shape if takes_views else self.check_image_shape
            check_shape(x.shape)
            x = self.run_stem(x)
        for number in range(active.frozen + 1, active.depth + 1):
            x = self.run_stage(number, x)
        if self.return_feature_map:
            return x.flatten(1)
        h = self.pool(x)
        bridge = str(active.depth)
        return self.bridges[bridge](h) if bridge in self.bridges else h

    def forward_frozen(self, images: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """Run the stem and the frozen stages on batches of images, without gradient.

        Depth dropout, drawn by the CPU generator, skips the same stages for all batches. Return the input of the first
        trained stage for each batch.
        """
        active = self.active_stages
        stages = list(range(1, active.frozen + 1))
        if active.depth_dropout:
            draws = torch.rand(len(stages), generator=generator).tolist()
            stages = [stage for stage, draw in zip(stages, draws, strict=True) if draw >= active.depth_dropout]
        for batch in images:
            self.check_view_shape(batch.shape)
        with torch.no_grad():
            outputs = [self.run_stem(batch) for batch in images]
            for stage in stages:
                outputs = [self.run_stage(stage, x) for x in outputs]
        return outputs

    def freeze_base(self, names: Collection[str], *, stages: int = 0, merged: Collection[str] = ()) -> None:
        """Freeze these layers, parameters and buffers, in all phases; the first ``stages`` have no other layers.

        The server changes those of them that are ``merged``.
        A module whose parameters are all frozen stays in eval mode, and so does batch normalization whose running
        statistics are. Copies by `frozen_copy` share the layers.
        """
        names, tensors = frozenset(names), self.state_dict(keep_vars=True)
        frozen = {id(tensors[name]): name for name in names}
        for name, tensor in tensors.items():
            if name not in names and id(tensor) in frozen:
                raise InputError(f"the tuning freezes {frozen[id(tensor)]}, which is also {name}; set tuning=full")
        self.base_names, self.frozen_stages, self.server_merged_names = names, stages, frozenset(merged)
        for name, parameter in self.named_parameters():
            if name in self.base_names:
                parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> "Encoder":
        """Set training mode; frozen stages and modules of base layers stay in eval mode, see `freeze_base`."""
        super().train(mode)
        for module in self._base_modules():
            module.training = False  # not eval(), which would call this method again
        if self.active_stages.frozen:
            for name, module in self.named_modules():
                if self.stage_range(name).frozen_from <= self.active_stages.frozen:
                    module.training = False  # not eval(), which would also change submodules
        return self

    def _base_modules(self) -> Iterator[nn.Module]:
        """Yield modules whose parameters are all base layers, with their submodules, and those with base buffers."""
        if not self.base_names:
            return
        for prefix, module in self.named_modules():
            names = {f"{prefix}.{name}".removeprefix(".") for name, _ in module.named_parameters()}
            if names and names <= self.base_names:
                yield from module.modules()
            elif any(f"{prefix}.{name}" in self.base_names for name, _ in module.named_buffers(recurse=False)):
                yield module

    def run_stage(self, number: int, x: Tensor) -> Tensor:
        """Return the output of a stage, counted from 1, after its adapter if it has one."""
        x = self.get_submodule(self.stage_names[number - 1])(x)
        return self.adapters[str(number)](x) if str(number) in self.adapters else x

    def stage_modules(self) -> list[nn.Module]:
        """Return the stages without their adapters."""
        return [self.get_submodule(name) for name in self.stage_names]

    def stage_range(self, name: str) -> StageRange:
        """Return the stage range of the layer or module ``name``; outside of all stages it belongs to the stem."""
        ranges = (
            stage_range for module, stage_range in self._stage_ranges.items() if f"{name}.".startswith(f"{module}.")
        )
        return next(ranges, StageRange(0, math.inf, 1))

    def add_bridges(self) -> None:
        """Add a bridge after each stage that is narrower than a representation."""
        for number, width in enumerate(self._widths, start=1):
            if width != self.feature_dim:
                self.bridges[str(number)] = nn.Linear(width, self.feature_dim)
                self._stage_ranges[f"bridges.{number}"] = StageRange(number, number, math.inf)

    def add_adapters(self, *, bottleneck: int, blocks: int | None) -> None:
        """Add an adapter to each of the last ``blocks`` stages, or to all; raises `InputError` for invalid numbers."""
        check_arguments("tuning", owner="adapter", bottleneck=bottleneck, blocks=blocks)
        stages = len(self.stage_names)
        if (blocks or 1) > stages:
            raise InputError(
                f"tuning.blocks={blocks} but the encoder has {stages} stages; set tuning.blocks to at most {stages}, "
                "or to null for all stages"
                if stages
                else "tuning=adapter but the encoder has no stages; set another tuning, such as bias"
            )
        if type(self).forward is not Encoder.forward:
            raise InputError(
                f"tuning=adapter but {type(self).__name__} overrides forward, which runs the adapters; override "
                "run_stem or pool instead, or set another tuning, such as bias"
            )
        for number in range(1 if blocks is None else stages - blocks + 1, stages + 1):
            self.adapters[str(number)] = Adapter(self._features[number - 1], bottleneck=bottleneck)
            self._stage_ranges[f"adapters.{number}"] = StageRange(number, math.inf, number)

    @property
    def adapter_settings(self) -> dict[str, int] | None:
        """Arguments of `add_adapters`; None without adapters."""
        sizes = [layer.out_features for name, layer in self.adapters.named_modules() if name.endswith(".down")]
        return {"bottleneck": sizes[0], "blocks": len(sizes)} if sizes else None


def frozen_copy(network: Network) -> Network:
    """Return a copy without gradients, such as a target network, whose encoder runs the same stages as the original.

    It shares the base layers with the original. A copy by `copy.deepcopy` has separate active stages and layers.
    """
    shared: list[object] = []
    for module in network.modules():
        if isinstance(module, Encoder):
            tensors = module.state_dict(keep_vars=True)
            shared += [module._stage_state, *(tensors[name] for name in sorted(module.base_names))]
    return copy.deepcopy(network, {id(value): value for value in shared}).requires_grad_(False)
