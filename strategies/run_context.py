"""Facts of a run, which server, strategies and mods share. They never change while it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fedssl.arrays import GlobalLayers, Layers
from fedssl.config.settings import Settings
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import copy_layers, exchanged_layers, global_layers, names_in_parts, read_layers
from fedssl.schedule.phases import Phase, phase_at
from fedssl.schedule.stages import Stages
from fedssl.wire.records import Codec
from strategies.types import GlobalModel


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Facts of a run."""

    settings: Settings  # completed by the data and the federation
    method: SSLMethod
    phases: Sequence[Phase]
    clients_per_round: int  # planned: without clients that cannot train, or devices that join later
    client_config: str  # settings of the clients, as text
    lr_factor: Callable[[int], float] = lambda round: 1.0  # factor of the clients' learning rate in a round
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_deployment: bool = False  # whether clients are edge clients
    untrained_clients: frozenset[int] = frozenset()  # they never train: unseen ones, and those with too few images
    # Returns the untrained layers of a new model. None: those of the settings.
    initial_layers: Callable[[], Layers] | None = None

    @property
    def server_has_images(self) -> bool:
        return self.settings.data.train is not None

    @property
    def has_server_optimizer(self) -> bool:
        return bool(self.settings.algorithm.server_optimizer.instantiate().is_active)

    @property
    def clients_cache_frozen(self) -> bool:
        """Return whether clients may cache frozen stages. Calibration would change them."""
        return len(self.phases) > 1 and self.settings.calibration is None

    @property
    def codec(self) -> Codec:
        """Return the codec of the models that clients and server exchange."""
        return Codec(self.settings.wire_dtype)

    @cached_property
    def stages(self) -> Stages:
        return Stages(self.method)

    @cached_property
    def gathered(self) -> GlobalLayers:
        """Return the names, shapes and dtypes of the parts that clients upload to the method's server side."""
        return GlobalLayers(self._copied(self.method.uploaded_parts))

    @cached_property
    def _no_layers(self) -> GlobalLayers:
        return global_layers(self.method, {})

    def global_layers(self, layers: Layers) -> GlobalLayers:
        """Return layers of a model as those that updates are compared with."""
        return self._no_layers.with_layers(layers)

    @cached_property
    def base(self) -> Layers:
        """Return the base layers, which nothing changes; none if all layers are exchanged."""
        return read_layers(self.method, self.method.base_names)

    def initial_model(self) -> GlobalModel:
        """Return an untrained model."""
        if self.initial_layers is not None:
            layers = self.initial_layers()
        else:
            layers = exchanged_layers(build_method(self.settings.model))
        return GlobalModel(layers=layers, broadcast=self._copied(self.method.broadcast_parts))

    def advance_to_phase(self, model: GlobalModel, round: int) -> GlobalModel:
        """Return the model at the start of a round, after all phase changes since its last training."""
        phase = phase_at(self.phases, round)
        layers = model.layers
        for later in self.phases[model.phase : phase.number]:
            layers = self.stages.transfer_weights(layers, later)
        return replace(model, layers=layers, phase=phase.number)

    def _copied(self, parts: tuple[str, ...]) -> Layers:
        return copy_layers(self.method, names_in_parts(self.method, parts))
