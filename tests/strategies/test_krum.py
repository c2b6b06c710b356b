"""Krum against its definition and Flower."""

from functools import partial

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.multikrum import select_multikrum

from fedssl.arrays import GlobalLayers, is_weight
from fedssl.errors import InputError
from fedssl.rules import check_rules
from fedssl.wire.records import arrays_to_record
from strategies.aggregate import aggregate
from strategies.gram_matrix import deviation_gram
from strategies.krum import Krum, KrumAggregator, krum, scores
from strategies.update_store import in_memory
from tests.contexts import run_context
from tests.strategies.test_robust import FIVE, ZERO, clients_of, model, update


def chosen_of(start, updates, *, malicious=1, select=1) -> list[int]:
    aggregator = KrumAggregator(malicious=malicious, select=select)
    aggregate(start, updates, aggregator, needs_cosines=False)
    return aggregator.chosen


def krum_slowly(start, updates, *, malicious, select):
    """Krum as it is defined, in float64, on the weights."""
    weights = [name for name in start if is_weight(name, start[name])]
    models = [np.concatenate([one.layers[name].astype(float).ravel() for name in weights]) for one in updates]
    sums = []
    for k, own in enumerate(models):
        distances = sorted(np.sum((own - other) ** 2) for j, other in enumerate(models) if j != k)
        sums.append(sum(distances[: len(models) - malicious - 2]))
    chosen = sorted(np.argsort(sums)[:select])
    mean = {name: np.mean([updates[k].layers[name].astype(float) for k in chosen], axis=0) for name in start}
    return [updates[k].partition_id for k in chosen], mean


@pytest.mark.parametrize(("malicious", "select"), [(0, 1), (1, 1), (2, 1), (1, 3), (2, 5)])
def test_krum_equals_its_definition(malicious, select):
    start = model(0)
    for seed in (1, 50, 100):
        clients = clients_of(start, 7, seed=seed)
        chosen, mean = krum_slowly(start, clients, malicious=malicious, select=select)
        assert chosen_of(start, clients, malicious=malicious, select=select) == chosen
        result = krum(start, clients, malicious=malicious, select=select)
        for name, array in start.items():
            expected = np.rint(mean[name]) if array.dtype.kind == "i" else mean[name]
            np.testing.assert_allclose(result[name], expected, rtol=1e-6, atol=1e-7)


def test_krum_sees_small_differences_between_large_models():
    # Weights are about 100 and clients differ by about 0.001: expanded in float32, squared distances of 0.1 are lost in
    # squared norms of 3e8. Flower's own function fails this test when it is fed with weights.
    random = np.random.default_rng(0)
    start = {"fc.weight": (100 + random.standard_normal((200, 150))).astype(np.float32)}
    for _ in range(5):
        clients = [
            update(
                k, **{"fc.weight": array + np.float32(1e-3 * (1 + k / 4)) * random.standard_normal(array.shape, "f4")}
            )
            for array in start.values()
            for k in random.permutation(6).tolist()
        ]
        clients.sort(key=lambda client: client.partition_id)
        chosen, _ = krum_slowly(start, clients, malicious=1, select=2)
        assert chosen_of(start, clients, malicious=1, select=2) == chosen


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize(("malicious", "select"), [(0, 1), (1, 1), (3, 2)])
def test_krum_chooses_as_flower_does(number, malicious, select):
    start = model(0)
    for seed in (1, 50):
        clients = clients_of(start, number, seed=seed)
        contents = []
        for position, client in enumerate(clients):
            weights = [name for name, array in start.items() if is_weight(name, array)]
            deviations = {name: client.layers[name].astype(float) - start[name] for name in weights}
            metrics = MetricRecord({"position": position})
            contents.append(RecordDict({"arrays": arrays_to_record(deviations), "metrics": metrics}))
        chosen = select_multikrum(contents, num_malicious_nodes=malicious, num_nodes_to_select=select)
        expected = sorted(content["metrics"]["position"] for content in chosen)
        assert chosen_of(start, clients, malicious=malicious, select=select) == expected


def test_scores_are_exact_where_clients_are_nearly_the_same():
    # All have moved far and in the same direction; they differ by a millionth of that.
    random = np.random.default_rng(0)
    start = {"fc.weight": random.standard_normal((300, 400)).astype(np.float32)}
    step = random.standard_normal((300, 400))
    moves = [start["fc.weight"].astype(float) + step * (1 + 1e-6 * random.standard_normal()) for _ in range(6)]
    clients = [update(k, **{"fc.weight": moved}) for k, moved in enumerate(moves)]
    start = {name: array.astype(float) for name, array in start.items()}
    models = [client.layers["fc.weight"] for client in clients]
    gram = deviation_gram(GlobalLayers(start), in_memory([client.layers for client in clients]), exact=True)
    for k, found in enumerate(scores(gram, malicious=1)):
        distances = sorted(np.sum((models[k] - other) ** 2) for other in models)
        assert found == pytest.approx(sum(distances[1:4]), rel=1e-2)


def test_settings_of_krum_out_of_range_are_refused():
    for refuses in (Krum, partial(krum, ZERO, FIVE)):
        with pytest.raises(InputError, match="^strategy.malicious=-1 must be an integer of at least 0$"):
            refuses(malicious=-1)
        with pytest.raises(InputError, match="^strategy.select=0 must be an integer of at least 1$"):
            refuses(select=0)


@pytest.mark.parametrize(
    ("malicious", "select", "min_clients"),
    [(0, 1, 3), (1, 1, 5), (2, 1, 7), (1, 4, 5), (1, 5, 6), (0, 9, 9)],  # 2 f + 3, or select + f if that is more
)
def test_krum_needs_enough_clients(malicious, select, min_clients):
    strategy = Krum(malicious=malicious, select=select)
    check_rules([strategy.problem], run_context(None, num_clients=10, clients_per_round=min_clients))
    message = f"needs clients_per_round of {min_clients} or more .* but it is {min_clients - 1}"
    with pytest.raises(InputError, match=message):
        check_rules([strategy.problem], run_context(None, num_clients=10, clients_per_round=min_clients - 1))
