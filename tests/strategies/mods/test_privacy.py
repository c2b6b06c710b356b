"""Differential privacy by the server: what it clips, how much noise it adds, and what epsilon is."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedssl.config.aggregation_settings import PrivacySettings
from fedssl.errors import InputError
from fedssl.export import load_encoder
from simulation.run import run
from strategies.mods.privacy import Privacy, _delta, epsilon, rounds_are_released_once
from tests.federation import Federation
from tests.runs import read_lines, read_summary

BEGUN = {
    "encoder.weight": np.array([1.0, 1.0], np.float32),
    "head.weight": np.array([0.0], np.float32),
    "head.running_mean": np.array([5.0], np.float32),
    "head.num_batches_tracked": np.array(3),
}
WENT = {
    "encoder.weight": np.array([4.0, 1.0], np.float32),
    "head.weight": np.array([4.0], np.float32),
    "head.running_mean": np.array([9.0], np.float32),
    "head.num_batches_tracked": np.array(8),
}
PRIVATE = ["privacy=central", "strategy=fedavg", "strategy.weighting=uniform", "encoder.norm=group"]
SMALL = ["num_clients=3", "rounds=2", "local_epochs=1", "dataset.limit=60", "threads=1", "partition=iid"]


def privacy(*, clip_norm=1.0, noise_multiplier=1.0, clients=2):
    settings = PrivacySettings(clip_norm=clip_norm, noise_multiplier=noise_multiplier, delta=1e-5)
    return Privacy(settings, clients=clients, generator=np.random.default_rng)


def test_an_update_is_cut_to_a_length_and_statistics_stay():
    """The way is (3, 0, 4), of length 5; cut to 1 it is (0.6, 0, 0.8), and within 6 it is whole."""
    cut = privacy(clip_norm=1.0).clip(WENT, BEGUN)
    np.testing.assert_allclose(cut["encoder.weight"], [1.6, 1.0], rtol=1e-6)
    np.testing.assert_allclose(cut["head.weight"], [0.8], rtol=1e-6)
    whole = privacy(clip_norm=6.0).clip(WENT, BEGUN)
    np.testing.assert_allclose(whole["head.weight"], [4.0])
    for found in (cut, whole):
        assert found["head.running_mean"] == 5.0
        assert found["head.num_batches_tracked"] == 3
    assert privacy().clip(BEGUN, BEGUN).keys() == BEGUN.keys()


def test_the_noisy_sum_over_asked_clients_is_released():
    """One of two clients replied: half its way. The noise of one of 2 clients with z = 3 and C = 2 is 3 * 2 / 2 = 3."""
    quiet = privacy(noise_multiplier=1e-9, clip_norm=2.0).add_noise(WENT, BEGUN, used=1, round=1)
    np.testing.assert_allclose(quiet["encoder.weight"], [2.5, 1.0], atol=1e-6)
    assert quiet["head.running_mean"] == 5.0

    large = {"w": np.zeros(100_000, np.float32)}
    released = privacy(noise_multiplier=3.0, clip_norm=2.0).add_noise(large, large, used=2, round=1)["w"]
    # The standard deviation of 100,000 draws errs by 3 / sqrt(200,000) = 0.007, their mean by 0.0095.
    assert released.std() == pytest.approx(3.0, abs=0.035)
    assert released.mean() == pytest.approx(0.0, abs=0.05)
    other = privacy(noise_multiplier=3.0, clip_norm=2.0).add_noise(large, large, used=2, round=2)["w"]
    assert abs(np.corrcoef(released, other)[0, 1]) < 0.02


def test_one_client_changes_the_sum_by_the_clip():
    """Whatever a client sends, the mean over K with it and without it differ by at most C / K, the sensitivity."""
    random, one = np.random.default_rng(0), privacy(clip_norm=0.5, clients=4)
    others = [{"w": random.normal(size=50).astype(np.float32) * 10} for _ in range(4)]
    begun = {"w": random.normal(size=50).astype(np.float32)}

    def total(updates):
        return sum((one.clip(update, begun)["w"].astype(np.float64) - begun["w"] for update in updates), np.zeros(50))

    for leave in range(4):
        without = [update for place, update in enumerate(others) if place != leave]
        assert np.linalg.norm(total(others) - total(without)) <= 0.5 * (1 + 1e-5)


def test_epsilon_by_hand():
    """One round with z = 1: delta(1) = Phi(-1/2) - e Phi(-3/2) = 0.3085375 - 2.7182818 * 0.0668072 = 0.1269367.

    Four rounds with z = 2 are one with z = 1, because noise multipliers add up as 1 / z^2.
    """
    assert epsilon(1, 1.0, 0.1269367) == pytest.approx(1.0, abs=1e-5)
    assert epsilon(4, 2.0, 0.1269367) == pytest.approx(1.0, abs=1e-5)
    assert epsilon(0, 1.0, 1e-5) == 0
    # Weaker bounds that are simple: eps < mu^2 / 2 + mu sqrt(2 ln(1 / delta)) (zero-concentrated privacy).
    for rounds, noise in ((1, 5.0), (100, 2.0), (1000, 0.5), (10, 0.05)):
        mu = math.sqrt(rounds) / noise
        assert 0 < epsilon(rounds, noise, 1e-5) < mu**2 / 2 + mu * math.sqrt(2 * math.log(1e5))


@pytest.mark.parametrize(("epsilon_", "mu"), [(0.5, 0.7), (3.0, 1.0), (8.0, 2.5)])
def test_delta_is_the_largest_advantage_of_who_looks(epsilon_, mu):
    """delta(eps) = sup over sets of P(S) - e^eps Q(S) for N(mu, 1) and N(0, 1): an integral of the positive part."""

    x = np.linspace(-20, 20, 400_001)
    p, q = (np.exp(-((x - at) ** 2) / 2) / math.sqrt(2 * math.pi) for at in (mu, 0.0))
    integral = np.maximum(p - math.exp(epsilon_) * q, 0).sum() * (x[1] - x[0])
    assert _delta(epsilon_, mu) == pytest.approx(integral, rel=1e-4)


def test_a_run_tells_what_it_spent_and_repeats_itself(tmp_path):
    overrides = [*PRIVATE, *SMALL, "privacy.noise_multiplier=0.8", "final_evaluation=none", "evaluate_every=0"]
    overrides += ["measure_resources=false", "collapse_images=0"]
    for name in ("a", "b"):
        run([*overrides, f"output_dir={tmp_path / name}"])
    summary = read_summary(tmp_path / "a")
    assert summary["privacy"] == {"epsilon": pytest.approx(epsilon(2, 0.8, 1e-5)), "delta": 1e-5}
    lines = [line["privacy"]["epsilon"] for line in read_lines(tmp_path / "a" / "metrics.jsonl")]
    assert lines == [pytest.approx(epsilon(1, 0.8, 1e-5)), pytest.approx(epsilon(2, 0.8, 1e-5))]
    one, other = (load_encoder(tmp_path / name / "encoder.pt").state_dict() for name in ("a", "b"))
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["encoder.norm=batch"], "privacy=central leaves running statistics out, which the encoder needs"),
        (["method=fedx"], "which the projector needs in eval mode; set method.projector.batch_norm=false method"),
        (["strategy=moon", "strategy.weighting=uniform"], "which the projector needs in eval mode"),
        (
            ["strategy=l_dawa"],
            "privacy=central needs a strategy that adds up the clients, but strategy=l_dawa compares",
        ),
        (["strategy=fedavg"], "privacy=central needs a strategy that adds up the clients"),
        (["strategy=median"], "privacy=central needs a strategy that adds up the clients"),
        (["method=orchestra"], "privacy=central does not cover the parts that Orchestra uploads"),
        (["schedule=layer_wise", "rounds=4"], "privacy=central needs clients that all send and receive"),
        (["aggregation.max_norm_ratio=10"], "aggregation.max_norm_ratio lets clients influence which others"),
    ],
)
def test_what_it_cannot_cover_is_refused(tmp_path, overrides, reason):
    usual = PRIVATE if "strategy" not in overrides[0] else [PRIVATE[0], PRIVATE[3]]
    with pytest.raises(InputError, match=reason):
        Federation(tmp_path, *SMALL, *usual, *overrides).run(1)


@pytest.mark.parametrize("own", [["method=fedx"], ["strategy=moon", "strategy.weight=1"]])
def test_the_remedies_for_heads_in_eval_mode_work(tmp_path, own):
    without = ["method.projector.batch_norm=false", "method.projector.last_batch_norm=false"]
    assert Federation(tmp_path, *SMALL, *PRIVATE, *own, "strategy.weighting=uniform", *without).run(1)


def test_statistics_that_the_tuning_freezes_are_allowed(tmp_path):
    frozen = ["encoder.norm=batch", "tuning=last_blocks", "tuning.freeze_statistics=true"]
    released = Federation(tmp_path, *SMALL, *PRIVATE, *frozen).run(1)
    assert released
    assert not any(name.startswith("encoder.") and "running" in name for name in released)


@pytest.mark.parametrize(("deployed", "every", "refused"), [(True, 1, False), (True, 5, True), (False, 5, False)])
def test_devices_receive_each_round_once(deployed, every, refused):
    settings = SimpleNamespace(privacy=object(), recording=SimpleNamespace(checkpoint_every=every))
    parts = SimpleNamespace(settings=settings, context=SimpleNamespace(is_deployment=deployed))
    assert rounds_are_released_once in Privacy.run_rules
    problem = rounds_are_released_once(parts)
    assert (problem is not None) == refused
    assert problem is None or problem.endswith("releases up to 4 rounds to the devices again; set checkpoint_every=1")
