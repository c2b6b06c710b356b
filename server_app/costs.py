"""What a round costs its clients: a training step is measured once per stage of the schedule, on the server."""

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import DictConfig

from fedssl.config import make
from fedssl.datasets.base import Pictures
from fedssl.methods.base import SSLMethod
from fedssl.schedule.phases import Phase
from fedssl.schedule.stages import enter
from fedssl.step_cost import StepCost, step_cost


class Costs:
    """Measures steps of the server's own copy of the method, in which it changes nothing but the stage.

    Parameters
    ----------
    settings : DictConfig
        Of the run.
    method : SSLMethod
    pictures : Pictures
        Of the federation.
    parts : sequence of ndarray
        The pictures of each client.
    device : torch.device
        Where the method is.
    """

    def __init__(
        self,
        settings: DictConfig,
        method: SSLMethod,
        pictures: Pictures,
        parts: Sequence[np.ndarray],
        device: torch.device,
    ) -> None:
        self._settings, self._method = settings, method
        self._pictures = [len(part) for part in parts]
        # The largest batch of any client: batches of an epoch differ by one picture at most.
        batch = max(-(-count // -(-count // settings.batch_size)) for count in self._pictures)
        self._images = pictures.images[:batch].to(device)
        self._labels = (
            pictures.labels[:batch].to(device) if method.uses_labels and pictures.labels is not None else None
        )
        self._steps: dict[int, StepCost] = {}

    def __call__(self, stage: Phase, clients: Sequence[int]) -> dict[str, float]:
        """FLOPs of a client's round, the mean over ``clients``, and the step's cost, see `fedssl.step_cost`."""
        step = self._steps.get(stage.number)
        if step is None:
            step = self._steps[stage.number] = self._measure(stage)
        pictures = float(np.mean([self._pictures[client] for client in clients])) * self._settings.local_epochs
        return {
            "flops": step.flops_per_picture * pictures,
            "flops_per_picture": step.flops_per_picture,
            "peak_memory": step.peak_memory,
            "trained_parameters": step.trained_parameters,
            "resident_parameters": step.resident_parameters,
        }

    def _measure(self, stage: Phase) -> StepCost:
        method, settings = self._method, self._settings
        enter(method, depth=stage.depth, frozen=stage.frozen, dropout=stage.dropout)
        cost = step_cost(
            method,
            images=self._images,
            augment=make(settings.augmentation),
            optimizer=make(settings.optimizer, [method.tensors[name] for name in method.trainable]),
            regularizer=make(settings.regularizer),
            precision=settings.precision,
            clip_norm=settings.clip_norm,
            labels=self._labels,
        )
        enter(method, depth=stage.depth)
        return cost
