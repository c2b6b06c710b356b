r"""Server-side calibration (LW-FedSSL, Tun et al., arXiv 2401.11647, Section 4.2): the server trains as well.

In every round the server trains all current stages of the encoder, and the heads, on its unlabeled auxiliary images,
with the settings of local training (Section 5.1). ``when="end"`` trains after the aggregation (Section 4.2), and
``when="start"`` before clients train (Algorithm 1), where the last aggregation is not calibrated.

$$
\bar{w} = \operatorname{rule}(w_1, \dots, w_K) \qquad w = \operatorname{SSL}(\bar{w}; D^g, E)
$$

with SSL the clients' training, for E epochs on the server's images $D^g$, without the regularizer and with a new
optimizer. With ``calibration.when=start`` the clients of a round start from $\operatorname{SSL}(w; D^g, E)$.
"""

from dataclasses import replace

import torch

from fedssl.config.settings import CalibrationSettings
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from fedssl.methods.unsaved_state import UnsavedState
from fedssl.model_arrays import exchanged_layers, load_layers, local_names, part_name
from fedssl.partition import server_indices
from fedssl.regularizers.base import Regularizer
from fedssl.schedule.phases import phase_at
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import derive_seed, seed_generators, torch_generator
from fedssl.training import LocalTrainer, train
from strategies.mods.base import Mod
from strategies.run_context import RunContext
from strategies.types import GlobalModel


class Calibration(Mod):
    """Server-side training of a global model, at the start or end of every round.

    ``training`` is a trainer as on clients, with a separate optimizer. Global layers are loaded into the method.
    """

    trains = True

    def __init__(self, settings: CalibrationSettings, *, context: RunContext, training: LocalTrainer) -> None:
        method, data, seed = context.method, context.settings.data, context.settings.seed
        if method.uses_labels:
            raise InputError(
                f"calibration trains on images without labels, which {type(method).__name__} cannot; "
                "set calibration=none or another method"
            )
        trained = {part_name(name) for name in local_names(method)} & {part_name(name) for name in method.trainable}
        if trained:
            parts = " and ".join(sorted(trained))
            raise InputError(
                f"calibration trains on the server, which does not have the clients' {parts}; set calibration=none or "
                f"method.exchange_{min(trained)}=true"
            )
        self._when = settings.when
        self._context, self._method, self._seed = context, method, seed
        images = load_federated(settings.data).images
        if images.shape[1] != data.channels or images.shape[2] != data.size:
            raise InputError(
                f"calibration.dataset has images of {tuple(images.shape[1:])} (channels, height, width) but the "
                f"run's have {data.channels} channels and {data.size} pixels; "
                "set calibration.dataset.size and calibration.dataset.channels to the same"
            )
        self._images = images  # no copy of the share, which may not fit into memory
        rows = server_indices(len(images), share=settings.share, seed=seed, min_images=method.min_batch_size)
        self._rows = torch.from_numpy(rows)
        self._training = replace(training, regularizer=Regularizer(), epochs=settings.epochs)
        self._unsaved = UnsavedState(method, *self._training.parts)

    @classmethod
    def make(cls, context: RunContext) -> "Calibration | None":
        """Return the calibration, with a separate optimizer; None if it is turned off."""
        settings = context.settings
        if settings.calibration is None:
            return None
        return cls(
            settings.calibration, context=context, training=LocalTrainer.build(settings.training, context.method)
        )

    def begin(self, model: GlobalModel, round: int) -> GlobalModel:
        return self._trained(model, round) if self._when == "start" else model

    def end(self, model: GlobalModel, round: int) -> GlobalModel:
        return self._trained(model, round) if self._when == "end" else model

    def _trained(self, model: GlobalModel, round: int) -> GlobalModel:
        with set_active_stages(self._method, depth=phase_at(self._context.phases, round).depth):
            self._unsaved.reset()
            load_layers(self._method, model.layers | model.broadcast)
            self._method.round = round
            self._method.start_round(first=True)
            seed_path = (self._seed, "calibrate", round)
            seed_generators(derive_seed(*seed_path), self._context.device)
            self._training.reset_optimizer(lr_factor=self._context.lr_factor(round))
            generator = torch_generator(*seed_path)
            train(self._method, self._images, self._rows, training=self._training, generator=generator)
            return replace(model, layers={**model.layers, **exchanged_layers(self._method)})
