"""What a round costs its clients: a training step is measured once per phase of the schedule, on the server."""

from collections.abc import Sequence

import numpy as np
import torch

from fedssl.datasets.base import ImageData
from fedssl.methods.base import SSLMethod
from fedssl.schedule.phases import Phase
from fedssl.schedule.stages import set_active_stages
from fedssl.step_cost import StepCost, step_cost
from fedssl.training import LocalTrainer, number_of_batches


class TrainingCostMeter:
    """Measures steps of the server's own copy of the method, which stays as it is.

    Parameters
    ----------
    method : SSLMethod
    training : LocalTrainer
        The clients'.
    image_data : ImageData
        Of the federation.
    parts : sequence of ndarray
        The images of each client.
    device : torch.device
        Where the method is.
    trainings_per_round : int
        How often a client trains in a round.
    """

    def __init__(
        self,
        method: SSLMethod,
        training: LocalTrainer,
        *,
        image_data: ImageData,
        parts: Sequence[np.ndarray],
        device: torch.device,
        trainings_per_round: int = 1,
    ) -> None:
        self._method, self._training, self._trainings_per_round = method, training, trainings_per_round
        self._num_images = [len(part) for part in parts]
        # The largest batch of any client: batches of an epoch differ by one image at most.
        min_batch_size = method.min_batch_size
        batch = max(
            -(-count // number_of_batches(count, training.batch_size, min_batch_size=min_batch_size))
            for count in self._num_images
        )
        self._images = image_data.images[:batch].to(device)
        self._labels = (
            image_data.labels[:batch].to(device) if method.uses_labels and image_data.labels is not None else None
        )
        self._steps: dict[int, StepCost] = {}

    def __call__(self, phase: Phase, clients: Sequence[int]) -> dict[str, float]:
        """FLOPs of a client's round, the mean over ``clients``, and the step's cost, see `fedssl.step_cost`."""
        if phase.number not in self._steps:
            with set_active_stages(
                self._method, depth=phase.depth, frozen=phase.frozen, depth_dropout=phase.depth_dropout
            ):
                self._steps[phase.number] = step_cost(
                    self._method, images=self._images, training=self._training, labels=self._labels
                )
        step = self._steps[phase.number]
        num_images = float(np.mean([self._num_images[client] for client in clients]))
        num_images *= self._training.epochs * self._trainings_per_round
        return {
            "flops": step.flops_per_image * num_images,
            "flops_per_image": step.flops_per_image,
            "peak_memory": step.peak_memory,
            "trained_parameters": step.trained_parameters,
            "resident_parameters": step.parameters_in_memory,
        }
