"""Self-supervised methods: an encoder, heads, and a loss on views of the same images."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.config.settings import ModelSettings
from fedssl.datasets.images import ImageSource
from fedssl.encoders.base import Encoder, frozen_copy
from fedssl.errors import InputError
from fedssl.low_rank_products import LowRankLayer
from fedssl.methods.saved_buffers import SavedBuffers
from fedssl.schedule.phases import make_phases
from fedssl.seeding import derive_seed, python_seed
from fedssl.views import AcceptedViews, Views

ImageTargets = Callable[[Tensor, Tensor], Tensor]  # (indices of a batch, its uint8 images) -> targets, (batch, dim)

TEACHER = "teacher"  # static part; the server reads its weights from the file of the setting `teacher`

INITIAL_ENCODER = "initial_encoder"  # static part; see `SSLMethod.keep_initial_encoder`


@dataclass(frozen=True, kw_only=True)
class FailureMode:
    """A diagnostic of a method, and its values after a failed training."""

    diagnostic: str  # key of `SSLMethod.diagnose`
    minimum: float = -math.inf  # smaller values are a failure
    maximum: float = math.inf  # larger values are a failure
    message: str  # the failure, and the setting to change; logged as a warning

    def applies(self, diagnostics: Mapping[str, float]) -> bool:
        """Return whether the training has failed in this way."""
        return not self.minimum <= diagnostics[self.diagnostic] <= self.maximum

    def describe(self, diagnostics: Mapping[str, float]) -> str:
        """Return the message with the diagnostic and the limit that it violates."""
        value = diagnostics[self.diagnostic]
        limit = f"below {self.minimum:g}" if value < self.minimum else f"above {self.maximum:g}"
        return f"{self.message} ({self.diagnostic} {value:.3g}, {limit})"


class SSLMethod(nn.Module):
    """Encoder with the heads and the loss that train it.

    The first component of a ``state_dict`` name is the part: ``encoder``, ``projector``, ``predictor``,
    ``target_encoder``, ``target_projector``. Parts named in ``local_parts`` are client state and never leave the
    client. The optimizer receives the parameters that require a gradient.

    A method may have a server side. Clients upload the parts named in ``uploaded_parts``, which are not averaged.
    `aggregate_parts` computes the parts named in ``broadcast_parts`` from them, which clients download and do not
    upload. All other parts are exchanged in both directions and aggregated by the strategy.
    """

    encoder: Encoder  # maps images ``(batch, channels, size, size)`` to representations h ``(batch, feature_dim)``
    local_parts: tuple[str, ...] = ()  # parts that never leave the client
    # Parts that clients send to the method's server side, and parts that the server side sends to clients. Their layers
    # have the names, shapes and dtypes of the newly built method.
    uploaded_parts: tuple[str, ...] = ()
    broadcast_parts: tuple[str, ...] = ()
    # Those of the ``broadcast_parts`` that `aggregate_parts` does not change: networks in eval mode. A client downloads
    # them once and caches them.
    static_parts: tuple[str, ...] = ()
    frozen: int = 0  # number of encoder stages that are frozen in the current phase, see `fedssl.schedule.stages`
    inactive_names: frozenset[str] = frozenset()  # layers that are not used in the current phase
    names_changed_at_start: tuple[str, ...] = ()  # exchanged layers that `start_round` changes
    # State of the target networks at the start of a round, see `fedssl.methods.momentum.EMATargetMethod`: "persist",
    # "reset" or "average"; None if the method has no target networks.
    target_init: str | None = None
    # Smallest number of images per step that provides a training signal. The default is 2: a single image has no other
    # image to compare with, and batch normalization maps it to 0.
    min_batch_size: int = 2
    uses_labels: bool = False  # whether `loss` needs the labels of the images
    accepted_views: AcceptedViews = AcceptedViews()  # that `loss` accepts; the default are two global views
    equal_global_sizes: bool = False  # whether `loss` concatenates the global views, which then need one size
    # Whether the teacher, if the method has one, encodes the views. Otherwise it encodes the images, see `targets`.
    teacher_sees_views: bool = True
    # Whether `loss` calls `fedssl.encoders.tokens.TokenEncoder.forward_tokens`, which does not support frozen stages.
    masks_patches: bool = False
    # Parts besides the encoder that the loss also uses in eval mode, with the downloaded running statistics.
    parts_in_eval_mode: tuple[str, ...] = ()
    follows_rounds: bool = False  # whether training in a round depends on the number of rounds
    reordering: str = ""  # setting that lets `end_round` exchange rows of weights; empty: none does
    # Parts whose ``forward`` `loss` calls on the whole global views, in their order, so that a regularizer can use
    # their outputs.
    regularized_parts: tuple[str, ...] = ("encoder", "projector")
    # Whether `loss` and `on_step_end` run the same operations in every step with the same batch size and the same
    # `step_constants`, on memory that does not move between rounds, so that CUDA graphs can capture them.
    cuda_graph_safe: bool = True
    round: int = 1  # the current round, counted from 1, for schedules over rounds
    rounds: int = 1  # number of rounds of the run
    seed: int = 0  # of the run
    client: int | None = None  # partition id of the client that trains, or number of a device; None on the server
    failure_modes: tuple[FailureMode, ...] = ()  # failures that `diagnose` detects

    @cached_property
    def named_tensors(self) -> dict[str, Tensor]:
        """Live parameters and buffers by name, cached because ``state_dict`` builds a new dictionary at every call.

        Base layers, which the encoder shares with its copies, have their name in ``encoder``.
        """
        tensors = dict(self.state_dict(keep_vars=True))
        own = {*self.base_names, *self.server_merged_names}
        base = {id(tensors[name]) for name in own}
        return {name: tensor for name, tensor in tensors.items() if id(tensor) not in base or name in own}

    @cached_property
    def saved_buffers(self) -> SavedBuffers:
        """Buffers that are exchanged and saved, for modules that assign them anew."""
        return SavedBuffers(self)

    def _forget_tensors(self) -> None:
        for name in ("named_tensors", "saved_buffers"):
            self.__dict__.pop(name, None)

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield parameters and buffers, and tensors that are neither."""
        yield from chain(self.parameters(), self.buffers())

    @cached_property
    def base_names(self) -> tuple[str, ...]:
        """Names of the base layers: layers of the encoder that the tuning freezes, in the order of the model.

        They are not exchanged, aggregated or trained. The server sends them once to a client that lacks them.
        """
        frozen = self.encoder.base_names - self.encoder.server_merged_names
        names = self.encoder.state_dict() if frozen else ()
        return tuple(f"encoder.{name}" for name in names if name in frozen)

    @cached_property
    def low_rank_layers(self) -> tuple[LowRankLayer, ...]:
        """Names of the factors of LoRA that are exchanged, also those of exchanged target networks."""
        layers = []
        for part in (part for part in ("encoder", "target_encoder") if part not in self.local_parts):
            for layer in self.encoder.low_rank_layers:
                if f"{part}.{layer.b}" in self.named_tensors:
                    shared = f"encoder.{layer.a}" in self.base_names
                    a = f"{'encoder' if shared else part}.{layer.a}"
                    layers.append(LowRankLayer(f"{part}.{layer.weight}", a, f"{part}.{layer.b}", layer.scale))
        return tuple(layers)

    @cached_property
    def product_names(self) -> dict[str, str]:
        """Names of the weights that products of LoRA are added to, by factor."""
        return {factor: pair.weight for pair in self.low_rank_layers for factor in (pair.a, pair.b)}

    @cached_property
    def server_merged_names(self) -> tuple[str, ...]:
        """Names of frozen weights of the encoder that the server adds products to, in the order of the model.

        They are exchanged in one direction: clients download them in every round, and neither train nor upload them.
        """
        merged = self.encoder.server_merged_names
        names = self.encoder.state_dict() if merged else ()
        return tuple(f"encoder.{name}" for name in names if name in merged)

    @cached_property
    def initial_values(self) -> dict[str, Tensor]:
        """Copies of the layers of the parts that `keep_local` declared, by name."""
        return {}

    @cached_property
    def moved_out(self) -> set[str]:
        """Names of the layers that `fedssl.model_arrays.move_layers_out` moved out and nothing has loaded since."""
        return set()

    @cached_property
    def read_copies(self) -> dict[str, Tensor]:
        """Copies of layers on the CPU inside `fedssl.model_arrays.read_once`, by name."""
        return {}

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the parameters that are trained if no encoder stage is frozen."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def bytes_of(self, names: Iterable[str]) -> int:
        """Return the size of the named parameters and buffers."""
        return sum(self.named_tensors[name].nbytes for name in names)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SSLMethod":
        self._forget_tensors()  # torch replaces buffers when it moves a module
        shared = list(self._shared_base())
        super()._apply(fn, recurse)
        tensors = self.encoder.state_dict(keep_vars=True) if shared else {}
        for tensors_of_module, key, name in shared:  # a conversion may replace a shared tensor by several
            tensors_of_module[key] = tensors[name]
        return self

    def _shared_base(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Yield where copies of the encoder have its base layers: tensors of a module, key, and name of the layer."""
        if not self.encoder.base_names:
            return
        tensors = self.encoder.state_dict(keep_vars=True)
        names = {id(tensors[name]): name for name in self.encoder.base_names}
        own = set(self.encoder.modules())
        for module in self.modules():
            for tensors_of_module in (module._parameters, module._buffers) if module not in own else ():
                for key, value in tensors_of_module.items():
                    if id(value) in names:
                        yield tensors_of_module, key, names[id(value)]

    def train(self, mode: bool = True) -> "SSLMethod":
        """Set training mode; static parts stay in eval mode."""
        super().train(mode)
        for part in self.static_parts:
            self.get_submodule(part).eval()
        return self

    def keep_initial_encoder(self) -> None:
        """Add the static part ``initial_encoder``, a frozen copy of the encoder, unless there is one.

        Called before the encoder is trained. Clients overwrite it by that of the server.
        """
        if INITIAL_ENCODER not in self.static_parts:
            self.add_module(INITIAL_ENCODER, frozen_copy(self.encoder).eval())
            self.broadcast_parts = (*self.broadcast_parts, INITIAL_ENCODER)
            self.static_parts = (*self.static_parts, INITIAL_ENCODER)
            self._forget_tensors()

    def keep_local(self, part: str) -> None:
        """Declare a part as local, such as a queue: it starts in a client's first round with its current values."""
        self.local_parts = (*self.local_parts, part)
        for name, tensor in self.state_dict().items():
            if name.partition(".")[0] == part:
                self.initial_values[name] = tensor.clone()

    @property
    def late_starts(self) -> dict[str, int]:
        """First round of what the method does not do from round 1 on, by setting."""
        return {}

    @property
    def step_constants(self) -> tuple[float, ...]:
        """Numbers that `loss` and `on_step_end` use and that change between rounds."""
        return ()

    def loss(self, views: Views) -> Tensor:
        """Return the training loss, a scalar, of the result of `inputs`.

        If stages are frozen, the images of the views are the output of the frozen stages.
        """
        raise NotImplementedError

    def inputs(self, views: Views) -> Views:
        """Return all views that `loss` needs: the given ones, and further ones that the method derives from them."""
        return views

    def targets(
        self, images: ImageSource, indices: Tensor, *, on_step_start: Callable[[], None] = lambda: None
    ) -> ImageTargets | None:
        """Return a function that computes `Views.targets` of a batch, or None if the method has no targets.

        Called before local training on the images at ``indices``, int64, ``(n,)``, on the CPU. The function maps
        indices among these, ``(batch,)``, and their images, uint8 on the method's device, to targets ``(batch, dim)``
        on the method's device. ``on_step_start`` as in `fedssl.training.train`, for long computations.
        """
        return None

    def store_targets_in(self, folder: Path) -> None:
        """Store targets that take long to compute in files of a folder, which all processes of a host share."""

    def start_round(self, *, first: bool) -> None:
        """Prepare for local training after the layers were loaded.

        ``first``: whether part of the client state was missing, because the client participates for the first time or
        the active stages changed. The parts of `keep_local` then start with their initial values.
        """
        if first and self.initial_values:
            self.load_state_dict(self.initial_values, strict=False)

    def on_step_end(self) -> None:
        """Run after each optimizer step, e.g. to update the moving average of a target network."""

    def end_round(self) -> None:
        """Run after local training, before client state and upload are read."""

    def parts_to_upload(self, layers: Layers) -> Layers:
        """Return the layers of ``uploaded_parts`` after local training, by name.

        ``layers`` are those of ``uploaded_parts`` and ``local_parts``, on the CPU, read-only.
        """
        return {name: array.copy() for name, array in layers.items() if name.partition(".")[0] in self.uploaded_parts}

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return diagnostics of the method's `failure_modes` by name, in eval mode and without gradient.

        ``views`` are those of `loss`. The method has the global layers, and client state as in a client's first round.
        """
        return {}

    def classify(self, h: Tensor) -> Tensor | None:
        """Return logits ``(batch, num_classes)`` of the method's classifier, if it uses labels; None if it has none."""
        return None

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        """Compute the broadcast parts on the server that change, with the shapes and dtypes of the current ones.

        ``uploaded`` are the parts of each client of the round, ordered by partition id; at least one. ``broadcast`` are
        at first the buffers of the newly built method.
        """
        return {}


def build_encoder(model: ModelSettings) -> Encoder:
    """Build the encoder with its initial weights: random ones of torch's generator, or those of a source."""
    encoder = model.encoder.make(Encoder)
    name = model.encoder.name
    if not encoder.stage_names or not isinstance(getattr(encoder, "feature_dim", None), int):
        raise InputError(f"{name} has no stages or no feature_dim; call define_stages and set feature_dim")
    if model.weights is not None:
        from fedssl.pretrained.loading import load_pretrained  # here: only a server needs it

        load_pretrained(encoder, model.weights)
    return encoder


def build_method(model: ModelSettings) -> SSLMethod:
    """Build the method with its encoder and heads, initialized from the run's seed alone, and apply the tuning."""
    with torch.random.fork_rng(devices=[]), python_seed(derive_seed(model.seed, "initialise")):
        torch.manual_seed(derive_seed(model.seed, "initialise"))
        encoder = build_encoder(model)
        encoder.accepts_views = True
        phases = make_phases(model.schedule, stages=len(encoder.stage_names))
        if phases[0].depth < len(encoder.stage_names):
            with torch.random.fork_rng(devices=[]):  # heads have the same initial weights under every schedule
                encoder.add_bridges()
        with torch.random.fork_rng(devices=[]):  # heads have the same initial weights under every tuning
            torch.manual_seed(derive_seed(model.seed, "tuning"))
            model.tuning.instantiate()(encoder)
        if encoder.base_names and len(phases) > 1:
            raise InputError(
                f"the schedule trains one stage after another, and tuning={model.tuning.name} freezes layers of all "
                "stages; set schedule=end_to_end or tuning=full"
            )
        method: SSLMethod = model.method.make(SSLMethod, encoder=encoder)
    if getattr(method, "encoder", None) is not encoder:
        raise InputError(f"{model.method.name} has no encoder; call super().__init__(encoder) in its constructor")
    method.rounds, method.seed = model.schedule.rounds, model.seed
    return method
