"""Server-side calibration (LW-FedSSL, Tun et al., arXiv 2401.11647, Section 4.2): the server trains as well.

In every round the server trains all stages of the encoder that there are so far, and the heads, on unlabelled auxiliary
pictures of its own, as a client would ("we use the same settings as local training", Section 5.1). ``at="end"``: after
the aggregation, as Section 4.2 has it; ``at="start"``: before clients begin, as Algorithm 1 has it, in which the last
aggregation is left as it is.
"""

import torch
from omegaconf import DictConfig

from fedssl.config import make
from fedssl.datasets.base import load
from fedssl.errors import InputError
from fedssl.layers import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_layers import load_layers, travelling_layers
from fedssl.partition import auxiliary
from fedssl.regularizers.base import Regularizer
from fedssl.schedule.phases import Phase, phase_at
from fedssl.schedule.stages import enter
from fedssl.seeding import derive, seed_torch, torch_generator
from fedssl.training import train


class Calibration:
    """Trains the global model on the server, see the module.

    Parameters
    ----------
    settings : DictConfig
        Of the run.
    method : SSLMethod
        Into which the global layers are loaded for this.
    schedule : list of Phase
        Of the run.
    device : torch.device
        Where the method is.

    Raises
    ------
    InputError
        The method needs labels, ``calibration.at`` is another word, or the auxiliary pictures have another form.
    """

    def __init__(self, settings: DictConfig, method: SSLMethod, schedule: list[Phase], device: torch.device) -> None:
        node = settings.calibration
        if node.at not in ("start", "end"):
            raise InputError(f"calibration.at={node.at} is unknown; set calibration.at=end or calibration.at=start")
        if method.uses_labels:
            raise InputError(
                f"calibration trains on pictures without labels, which {type(method).__name__} cannot; "
                "set calibration=none or another method"
            )
        self.at: str = node.at
        self._settings, self._method, self._schedule, self._device = settings, method, schedule, device
        pictures = load(node.dataset or settings.dataset, "federated").images
        if pictures.shape[1] != settings.dataset.channels or pictures.shape[2] != settings.dataset.size:
            raise InputError(
                f"calibration.dataset has pictures of {tuple(pictures.shape[1:])} (channels, height, width) but the "
                f"run's have {settings.dataset.channels} channels and {settings.dataset.size} pixels; "
                "set calibration.dataset.size and calibration.dataset.channels to the same"
            )
        rows = auxiliary(len(pictures), share=node.share, seed=settings.seed)
        self._images = pictures[torch.from_numpy(rows)].to(device)
        self._augment = make(settings.augmentation)
        self._optimizer = make(settings.optimizer, [method.tensors[name] for name in method.trainable])
        self._lrs = [group["lr"] for group in self._optimizer.param_groups]
        self._lr_factor = make(settings.lr_schedule)

    def __call__(self, round: int, layers: Layers) -> Layers:
        """The global layers, trained further."""
        stage = phase_at(self._schedule, round)
        enter(self._method, depth=stage.depth)
        load_layers(self._method, layers)
        self._method.start_round(first=True)
        place = (self._settings.seed, "calibrate", round)
        seed_torch(derive(*place), self._device)
        self._optimizer.state.clear()
        factor = self._lr_factor(round, rounds=self._settings.rounds, stage=stage)
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * factor
        train(
            self._method,
            self._images,
            torch.arange(len(self._images)),
            augment=self._augment,
            optimizer=self._optimizer,
            regularizer=Regularizer(),
            epochs=self._settings.calibration.epochs,
            batch_size=self._settings.batch_size,
            precision=self._settings.precision,
            channels_last=self._settings.channels_last,
            clip_norm=self._settings.clip_norm,
            generator=torch_generator(*place),
        )
        return {**layers, **travelling_layers(self._method)}
