"""Which stages of an encoder run: active, frozen and skipped ones, in an encoder whose output lists them."""

import copy

import pytest
import torch
from torch import nn

from fedssl.encoders.base import ActiveStages, Encoder, frozen_copy


class Digit(nn.Module):
    def __init__(self, digit):
        super().__init__()
        self.digit = digit

    def forward(self, x):
        return 10 * x + self.digit


class Digits(Encoder):
    """Stage k appends the digit k: zero becomes 123 after three stages."""

    def __init__(self, widths=(1, 1, 1)):
        super().__init__()
        self.feature_dim = 1
        self.blocks = nn.Sequential(Digit(1), Digit(2), Digit(3))
        self.define_stages(stages=("blocks.0", "blocks.1", "blocks.2"), widths=widths)

    def pool(self, x):
        return x.flatten(1)


ZERO = torch.zeros(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("frozen", "depth", "of_frozen", "of_others"), [(0, 3, 0, 123), (0, 2, 0, 12), (1, 3, 1, 23), (2, 3, 12, 3)]
)
def test_frozen_stages_run_first_and_active_ones_in_forward(frozen, depth, of_frozen, of_others):
    encoder = Digits()
    with encoder.run_stages(ActiveStages(depth, frozen)):
        assert encoder(ZERO).item() == of_others
        (output,) = encoder.forward_frozen([ZERO], torch.Generator())
    assert output.item() == of_frozen


def test_depth_dropout_is_the_share_of_skipped_stages():
    encoder = Digits()
    generator = torch.Generator().manual_seed(0)
    with encoder.run_stages(ActiveStages(depth=3, frozen=2, depth_dropout=0.9)):
        outputs = [encoder.forward_frozen([ZERO], generator)[0].item() for _ in range(1000)]
    # Each of two stages runs with probability 0.1; the standard deviation of 2000 draws is 0.0067.
    assert sum(len(str(int(output)).replace("0", "")) for output in outputs) / 2000 == pytest.approx(0.1, abs=0.03)
    assert set(outputs) == {0, 1, 2, 12}


def test_active_stages_are_restored_after_an_error():
    encoder = Digits()
    with pytest.raises(KeyError), encoder.run_stages(ActiveStages(1)):
        raise KeyError
    assert encoder.active_stages == ActiveStages(3)
    with pytest.raises(AttributeError):
        encoder.active_stages = ActiveStages(1)
    with pytest.raises(AttributeError):
        encoder.active_stages.depth = 1


def test_a_frozen_copy_runs_the_stages_of_its_original():
    encoder = Digits()
    shared, independent = frozen_copy(encoder), copy.deepcopy(encoder)
    with encoder.run_stages(ActiveStages(2)):
        assert [network(ZERO).item() for network in (encoder, shared, independent, Digits())] == [12, 12, 123, 123]
        # Copies that are made together share their stages with each other, not with the originals.
        first, second = copy.deepcopy((encoder, shared))
        with first.run_stages(ActiveStages(1)):
            assert [network(ZERO).item() for network in (first, second, encoder)] == [1, 1, 12]
    assert shared(ZERO).item() == 123


def test_a_bridge_runs_at_the_depth_of_its_stage_only():
    encoder = Digits(widths=(2, 1, 1))
    encoder.add_bridges()
    assert encoder.stage_range("bridges.1.weight") == (1, 1, float("inf"))
