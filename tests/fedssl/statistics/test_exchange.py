"""The messages of the statistics: exact through secure aggregation's steps, and nothing but counts is read."""

import math

import numpy as np
import pytest
import torch

from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.datasets.images import TensorImages
from fedssl.secure_aggregation.masks import dequantized_mean, quantize
from fedssl.secure_aggregation.protocol import TARGET_RANGE, delta_of
from fedssl.statistics.exchange import LAYER, answer, exact_steps, make_plan, read_answer, read_mean
from fedssl.statistics.sums import LIMB_BITS, ImageSums
from fedssl.wire.messages import ClientUpdate, TrainPlan

PLAN = make_plan("settings", code_fingerprint="code")


def an_answer(seed: int = 0):
    images = torch.from_numpy(np.random.default_rng(seed).integers(256, size=(5, 2, 4, 4), dtype=np.uint8))
    return answer(PLAN, TensorImages(images), torch.arange(5), on_step_start=lambda: None)


def same(one: ImageSums, other: ImageSums) -> bool:
    totals = [(each.images, each.sums, each.squares) for each in (one, other)]
    return np.array_equal(one.histogram, other.histogram) and totals[0] == totals[1]


def test_an_answer_survives_its_message():
    plan, update = an_answer()
    received = ClientUpdate.from_content(update.to_content(plan), 3)
    assert same(read_answer(received, channels=2), read_answer(update, channels=2))
    assert TrainPlan.from_content(PLAN.to_content()) == PLAN


def test_a_limb_is_a_step_of_secure_aggregation():
    """Quantization is exact, so that random rounding has no effect, and the mean of 3 clients gives their sum."""
    assert 1 << LIMB_BITS == TARGET_RANGE
    clipping_range = exact_steps(SecureAggregationSettings(clipping_range=8.0)).clipping_range
    total, expected = 0, ImageSums.zero(2)
    for seed in range(3):
        plan, update = an_answer(seed)
        expected += read_answer(update, channels=2)
        ranges = {"clipping_range": clipping_range, "target_range": TARGET_RANGE}
        steps = quantize(delta_of(update.layers, plan.layers), np.random.default_rng(seed), **ranges)
        total = total + steps.astype(np.int64)
    mean = dequantized_mean(
        total, clients=3, total_weight=3 * TARGET_RANGE, clipping_range=clipping_range, target_range=TARGET_RANGE
    )
    assert same(read_mean(mean, clients=3, channels=2), expected)


def _with(value: float) -> ClientUpdate:
    layer = an_answer()[1].layers[LAYER].copy()
    layer[7] = value
    return ClientUpdate(layers={LAYER: layer}, partition_id=0)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (ClientUpdate(layers={}, partition_id=0), "sent no sums instead of 4120 for 2 channels"),
        (ClientUpdate(layers={LAYER: np.zeros(3, np.float32)}, partition_id=0), "sent 3 numbers instead of 4120"),
        (ClientUpdate(layers={LAYER: np.zeros(4120)}, partition_id=0), "sent 4120 numbers"),
        *((_with(value), "no counts") for value in (0.5, math.nan, math.inf, 2.0**21, -(2.0**21) - 1)),
    ],
)
def test_answers_that_are_no_counts(update, reason):
    with pytest.raises(ValueError, match=reason):
        read_answer(update, channels=2)
