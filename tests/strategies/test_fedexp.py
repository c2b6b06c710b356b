"""FedExP by hand, against Eq. 8 in float64, and never below federated averaging."""

from functools import partial

import numpy as np
import pytest

from fedssl.arrays import NO_COSINES, GlobalLayers
from fedssl.wire.messages import ClientUpdate
from strategies.fedavg import fedavg
from strategies.fedexp import ExtrapolatedSum
from strategies.weighted_sum import WeightedSum
from tests.federation import Federation


def extrapolated(start, models, *, epsilon=0.0, weighting="uniform", examples=None):
    aggregator = ExtrapolatedSum(WeightedSum(weighting=weighting), epsilon=epsilon)
    start = {name: np.array(value, np.float32) for name, value in start.items()}
    aggregator.start(GlobalLayers(start))
    updates = [
        ClientUpdate(
            layers={name: np.array(value, np.float32) for name, value in model.items()},
            partition_id=client,
            num_examples=(examples or [1] * len(models))[client],
        )
        for client, model in enumerate(models)
    ]
    for update in updates:
        aggregator.add(update, NO_COSINES)
    return aggregator.finish(), aggregator.server_lr, partial(fedavg, start, updates, weighting=weighting)


def test_two_clients_by_hand():
    # Changes (3, 1) and (-1, 1): squares 10 and 2, mean 6. Their mean is (1, 1) of square 2: eta = 6 / (2 * 2) = 1.5.
    new, lr, _ = extrapolated({"w": [1, 1]}, [{"w": [4, 2]}, {"w": [0, 2]}])
    assert lr == 1.5
    assert new["w"].tolist() == [2.5, 2.5]
    # With epsilon = 0.5: 6 / (2 * 2.5) = 1.2.
    assert extrapolated({"w": [1, 1]}, [{"w": [4, 2]}, {"w": [0, 2]}], epsilon=0.5)[1] == 1.2


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_slow_transcription(weighting):
    random = np.random.default_rng(1)
    start, examples = random.standard_normal(40), [1, 5, 2, 9, 3]
    models = start + random.standard_normal((5, 40))
    beta = np.array(examples if weighting == "examples" else [1] * 5, float)
    beta /= beta.sum()
    changes = models - start
    mean = beta @ changes
    eta = max(1.0, beta @ (changes**2).sum(axis=1) / (2 * (mean @ mean + 0.001)))  # Eq. 8
    assert eta > 1
    new, lr, _ = extrapolated(
        {"w": start}, [{"w": model} for model in models], epsilon=0.001, weighting=weighting, examples=examples
    )
    assert lr == pytest.approx(eta, rel=1e-5)
    np.testing.assert_allclose(new["w"], start + eta * mean, rtol=1e-5, atol=1e-5)


def test_clients_that_agree_are_averaged():
    # Equal changes: the mean of squares is the square of the mean, and half of their ratio is below 1.
    models = [{"w": [2, 3], "bn.running_mean": [5]}, {"w": [2, 3.1], "bn.running_mean": [7]}]
    new, lr, average = extrapolated({"w": [1, 1], "bn.running_mean": [0]}, models)
    assert lr == 1
    for name, layer in average().items():
        np.testing.assert_array_equal(new[name], layer)


def test_the_step_of_a_run_is_recorded(tmp_path):
    federation = Federation(tmp_path, "strategy=fedexp", "strategy.epsilon=1e-12", "wire_dtype=fp16")
    federation.run(2)
    assert federation.report.strategy_metrics["server_lr"] >= 1


@pytest.mark.parametrize("models", [[1, 1], [0, 2]])
def test_without_a_mean_change_the_model_stays(models):
    """Clients that have not changed, or whose changes cancel, with epsilon=0: Eq. 8 divides by zero."""
    new, lr, _ = extrapolated({"w": [1]}, [{"w": [model]} for model in models])
    assert (new["w"].tolist(), lr) == ([1], 1)
