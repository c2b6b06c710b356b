"""The messages of the statistics, which have the form of a plan and an update with one layer: the limbs of the sums.

So they pass secure aggregation as an update does. Its steps are whole numbers around 0 (`exact_steps`), and a limb is
one of them: nothing is rounded, and the mean over clients times their number is the sum.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.datasets.images import ImageSource
from fedssl.statistics.sums import DTYPES, LIMB, ImageSums, num_limbs, sums_of
from fedssl.wire.messages import ClientUpdate, TrainPlan

QUERY = "statistics"  # action of the messages
LAYER = "sums"
_HALF = LIMB // 2


def make_plan(settings: str, *, code_fingerprint: str) -> TrainPlan:
    """Return the plan of the query. ``settings`` are those of training."""
    return TrainPlan(
        round=0, layers={}, settings=settings, metrics=(), oldest_resumable_round=0, code_fingerprint=code_fingerprint
    )


def answer(
    plan: TrainPlan, images: ImageSource, rows: torch.Tensor, *, on_step_start: Callable[[], None]
) -> tuple[TrainPlan, ClientUpdate]:
    """Return the update of a client with the images at ``rows``, and the plan with the layer that it changes."""
    limbs = sums_of(images, rows, on_step_start=on_step_start).to_limbs()
    start = {LAYER: np.zeros(len(limbs), np.float32)}
    return replace(plan, layers=start), ClientUpdate(layers={LAYER: (limbs - _HALF).astype(np.float32)}, partition_id=0)


def read_answer(update: ClientUpdate, *, channels: int) -> ImageSums:
    """Return the sums of an update; raises `ValueError` with a predicate if it has none."""
    layer = update.layers.get(LAYER)
    if layer is None or layer.dtype != np.float32 or layer.shape != (num_limbs(channels),):
        found = "no sums" if layer is None else f"{layer.size} numbers"
        raise ValueError(
            f"sent {found} instead of {num_limbs(channels)} for {channels} channels and {len(DTYPES)} dtypes"
        )
    limbs = layer.astype(np.float64) + _HALF
    if not (np.isfinite(limbs).all() and (limbs == np.floor(limbs)).all() and 0 <= limbs.min() <= limbs.max() < LIMB):
        raise ValueError("sent numbers that are no counts")
    return ImageSums.from_limbs(limbs, channels=channels)


def exact_steps(settings: SecureAggregationSettings) -> SecureAggregationSettings:
    """Return settings under which a limb is a step."""
    return replace(settings, clipping_range=float(_HALF))


def read_mean(mean: np.ndarray, *, clients: int, channels: int) -> ImageSums:
    """Return the sums over clients from the mean of their layers."""
    return ImageSums.from_limbs(np.rint((mean + _HALF) * clients), channels=channels)
