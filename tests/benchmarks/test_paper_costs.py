"""The paper's cost table, computed from the model and the schedules."""

from functools import partial

import pytest
import torch

from benchmarks.paper_costs import paper_bytes, paper_flops
from fedssl.encoders import vit_tiny
from fedssl.methods.heads import MLP
from fedssl.methods.moco_v3 import MoCoV3
from fedssl.schedule.phases import end_to_end, layer_wise, progressive

ROUNDS, BLOCKS = 180, 12
IMAGE = torch.zeros(1, 3, 32, 32)
SCHEDULES = {kind.__name__: kind(rounds=ROUNDS, depth=BLOCKS) for kind in (end_to_end, layer_wise, progressive)}
PROJECTOR = partial(MLP, hidden_dim=4096, out_dim=256, num_layers=3, last_batch_norm=True)


@pytest.fixture(scope="module")
def moco():
    predictor = partial(MLP, hidden_dim=4096, out_dim=256, num_layers=2, last_batch_norm=True)
    encoder = vit_tiny(channels=3, size=32, patch=4, depth=BLOCKS, pool="mean")
    return MoCoV3(encoder, projector=PROJECTOR, predictor=predictor, temperature=0.2, ema_decay=0.99)


@pytest.mark.parametrize(
    ("schedule", "aligned", "expected"), [("layer_wise", True, "0.48"), ("progressive", False, "0.57")]
)
def test_ratios_of_flops_of_the_paper(moco, schedule, aligned, expected):
    whole = paper_flops(moco, SCHEDULES["end_to_end"], image=IMAGE)
    assert f"{paper_flops(moco, SCHEDULES[schedule], image=IMAGE, aligned=aligned) / whole:.2f}" == expected


def test_flops_by_hand(moco):
    """64 tokens of 192 numbers. Multiply-adds of a block, of which every weight meets every token: queries, keys and
    values 3 * 192^2, the output 192^2, the inner layers 2 * 192 * 768, together 442,368 * 64; attention twice
    64 * 64 * 192; two normalisations of 5 * 64 * 192. Patches are 64 times 48 numbers that become 192.
    """
    block = 442_368 * 64 + 2 * 64 * 64 * 192 + 2 * 5 * 64 * 192
    assert block == 30_007_296
    patches = 64 * 48 * 192
    projector = 192 * 4096 + 4096 * 4096 + 4096 * 256
    predictor = 256 * 4096 + 4096 * 256
    heads = 3 * (projector + predictor) + projector  # online forward and backward, target
    whole = 4 * (12 * block + patches) + heads
    assert paper_flops(moco, SCHEDULES["end_to_end"], image=IMAGE) == 180 * whole
    # Phase s: s - 1 frozen blocks and one that is trained online, s in the target; patches are trained in stage 1.
    stages = [((s - 1) + 3 + s) * block + (4 if s == 1 else 2) * patches + heads for s in range(1, 13)]
    assert paper_flops(moco, SCHEDULES["layer_wise"], image=IMAGE) == 15 * sum(stages)


@pytest.mark.parametrize(
    ("schedule", "calibrated", "down", "up"),
    [
        ("end_to_end", False, 1, 1),
        ("layer_wise", False, 1 / 12, 1 / 12),
        ("layer_wise", True, 6.5 / 12, 1 / 12),  # stage s brings s blocks down, 6.5 on average
        ("progressive", False, 6.5 / 12, 6.5 / 12),
    ],
)
def test_communication_of_the_paper(moco, schedule, calibrated, down, up):
    # A block: two normalizations of 2 * 192, and the weights of four linear layers with their biases.
    block = 2 * 2 * 192 + (192 + 1) * 3 * 192 + (192 + 1) * 192 + (192 + 1) * 768 + (768 + 1) * 192
    assert block == 444_864
    whole = 180 * 12 * 4 * block
    expected = (round(down * whole), round(up * whole))
    assert paper_bytes(moco, SCHEDULES[schedule], calibrated=calibrated) == expected
