"""How a client chooses between models that it receives."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from fedssl.arrays import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, load_layers
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientState, ClientStrategy, CommunicationSummary, LocalData

# In a client's state, before the names of its encoder's layers as its last training left them.
LAST_ENCODER_PREFIX = "own."


def feature_distance(z1: torch.Tensor, z2: torch.Tensor) -> float:
    """Mean of minus the cosine of representations of the same images (Dec-SSL, arXiv 2210.10947, section 5).

    Both are ``(n, dim)``; the result is in [-1, 1], and a representation of length 0 counts as 0.
    """
    return -float(F.cosine_similarity(z1.double(), z2.double(), dim=1).mean())


def argmin(distances: Sequence[float]) -> int:
    """The place of the smallest distance, the first of equals; what is no number is the farthest."""
    return min(range(len(distances)), key=lambda place: (math.isnan(distances[place]), distances[place]))


def encoder_names(plan: TrainPlan) -> list[str]:
    """Names of the encoder's layers in a plan."""
    return [name for name in plan.layers if name.startswith("encoder.")]


class SelectByFeatures(ClientStrategy):
    """A client that takes the model whose representations of its images are nearest to those of its own last model.

    Parameters
    ----------
    num_images : int
        Of how many of its images, at least 1.
    """

    selects_by_state = True

    def __init__(self, *, num_images: int) -> None:
        self.num_images = num_images

    def select_model(
        self, method: SSLMethod, plans: Sequence[TrainPlan], state: ClientState | None, local_data: LocalData
    ) -> int:
        own = {
            name.removeprefix(LAST_ENCODER_PREFIX): value.numpy()
            for name, value in (state or {}).items()
            if name.startswith(LAST_ENCODER_PREFIX)
        }
        if not own:
            return 0
        encoders = [{name: plan.layers[name] for name in encoder_names(plan)} for plan in plans]
        # Where the encoder has grown since, what is new is in the client's own model as in the first that is offered.
        load_layers(method, encoders[0] | {name: array for name, array in own.items() if name in encoders[0]})
        mine = local_data.features(method, self.num_images)
        distances = []
        for encoder in encoders:
            load_layers(method, encoder)
            distances.append(feature_distance(mine, local_data.features(method, self.num_images)))
        return argmin(distances)

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        kept = super().state_to_save(method, plan, start=start, state=state)
        if not plan.candidate_arrays:
            return kept
        return {
            **kept,
            **{
                f"{LAST_ENCODER_PREFIX}{name}": value
                for name, value in clone_tensors(method, encoder_names(plan)).items()
            },
        }

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return replace(usual, local_state=", ".join([*method.local_parts, "own encoder"]))


class SelectByLoss(ClientStrategy):
    """A client that takes the model with the smallest training loss on its images (IFCA, Ghosh et al. 2020).

    Parameters
    ----------
    num_images : int
        On how many of its images, at least 1.
    """

    def __init__(self, *, num_images: int) -> None:
        self.num_images = num_images

    def select_model(
        self, method: SSLMethod, plans: Sequence[TrainPlan], state: ClientState | None, local_data: LocalData
    ) -> int:
        losses = []
        for plan in plans:
            self.load_start(method, plan, state)
            losses.append(local_data.loss(method, self.num_images))
        return argmin(losses)
