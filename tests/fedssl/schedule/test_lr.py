"""Learning rates over the rounds: by hand, and through to the clients' optimizer."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from fedssl.errors import InputError
from fedssl.schedule.lr import cosine, step
from fedssl.schedule.phases import Phase, layer_wise, phase_at
from tests.federation import Federation

WHOLE = Phase(number=1, first=1, rounds=10, depth=1)


def test_cosine_by_hand():
    # (1 + cos(pi t)) / 2 at t = 0, 1/4, 1/2, 3/4; cos(pi / 4) = sqrt(2) / 2.
    whole = [cosine(round, rounds=4, phase=WHOLE) for round in (1, 2, 3, 4)]
    assert whole == pytest.approx([1, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2])
    assert cosine(3, rounds=4, phase=WHOLE, eta_min_factor=0.2) == pytest.approx(0.6)


def test_cosine_per_stage_begins_anew():
    # Stages of 2 and 4 rounds: t = 0, 1/2 and then 0, 1/4, 1/2, 3/4.
    stages = layer_wise(rounds=6, depth=2, rounds_per_stage=[2, 4])
    factors = [cosine(r, rounds=6, phase=phase_at(stages, r), per_stage=True) for r in range(1, 7)]
    assert factors == pytest.approx([1, 0.5, 1, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2])


def test_step_by_hand():
    assert [step(round, rounds=100, phase=WHOLE, milestones=[0.55], factor=0.1) for round in (55, 56)] == [1, 0.1]
    factors = [step(round, rounds=10, phase=WHOLE, milestones=[0.3, 0.6], factor=0.1) for round in range(1, 11)]
    assert factors == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cosine(1, rounds=4, phase=WHOLE, eta_min_factor=2), "lr_schedule.eta_min_factor=2"),
        (lambda: step(1, rounds=4, phase=WHOLE, milestones=[3], factor=0.1), r"lr_schedule.milestones=\[3\]"),
        (lambda: step(1, rounds=4, phase=WHOLE, milestones=[0.5], factor=0), "lr_schedule.factor=0"),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_the_factor_reaches_the_clients(tmp_path):
    """With a factor of 0 nothing is learned: weights stay, and only running statistics move."""
    federation = Federation(tmp_path, "strategy=fedavg", "num_clients=2", "optimizer.weight_decay=0")
    before = dict(federation.layers)
    rounds = federation.components.federation
    still = replace(rounds, context=replace(rounds.context, lr_factor=lambda round: 0.0))
    federation.components = replace(federation.components, federation=still)
    after = federation.run(1)
    assert all(plan["config"]["lr-factor"] == 0 for plan in federation.plans)
    weight = "encoder.blocks.0.0.weight"
    np.testing.assert_allclose(after[weight], before[weight], rtol=1e-6)
    assert not np.allclose(after["encoder.blocks.0.1.running_mean"], before["encoder.blocks.0.1.running_mean"])
    federation.components = replace(federation.components, federation=rounds)
    assert not np.allclose(federation.run(1)[weight], after[weight], rtol=1e-4)
