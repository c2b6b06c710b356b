"""Median, trimmed mean and Krum against NumPy, SciPy, Flower and the definition of Krum; poison, buffers, dropouts."""

import logging
from functools import partial
from math import ceil

import numpy as np
import pytest
import scipy.stats

from fedssl.errors import InputError
from fedssl.rules import check_rules
from fedssl.wire.messages import ClientUpdate
from strategies.fedavg import fedavg
from strategies.krum import Krum, krum
from strategies.robust import Median, TrimmedMean, median, num_trimmed, trimmed_mean
from tests.arrays import same
from tests.contexts import run_context
from tests.federation import Federation
from tests.server_app.small import LAYERS
from tests.server_app.test_round import crash, good, run_round
from tests.strategies import made

RULES = {"median": median, "trimmed_mean": trimmed_mean, "krum": krum, "multi-krum": partial(krum, select=3)}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def update(partition_id, **layers):
    return ClientUpdate(layers={name: np.asarray(array) for name, array in layers.items()}, partition_id=partition_id)


def model(seed):
    """Layers of all kinds; the counter is far larger than any weight, as after a long training."""
    return {**made.model(seed), "bn.num_batches_tracked": np.array(100_000 + 10 * seed)}


def clients_of(start, number, *, seed=1):
    """Updates that differ from ``start`` by random steps, in client order."""
    updates = []
    for k in range(number):
        step = model(seed + k)
        layers = {
            name: np.asarray(array + (seed + k if array.dtype.kind == "i" else 0.1 * step[name]), array.dtype)
            for name, array in start.items()
        }
        updates.append(ClientUpdate(layers=layers, partition_id=k, num_examples=10))
    return updates


#
# Five clients hold the numbers 1, 2, 4, 8 and 100. The median is 4; without 100 it is (2 + 4) / 2 = 3. A share of 0.2
# cuts off one client at each end, which leaves (2 + 4 + 8) / 3 = 14/3.
# Krum with f = 1 adds the squared distances to the 5 - 1 - 2 = 2 nearest others:
#   1: 1 + 9 = 10    2: 1 + 4 = 5    4: 4 + 9 = 13    8: 16 + 36 = 52    100: 92^2 + 96^2 = 17680
# The least is 2; the least three are 1, 2 and 4, whose mean is 7/3.

NUMBERS = [8.0, 1.0, 100.0, 2.0, 4.0]
FIVE = [update(k, a=np.array([number])) for k, number in enumerate(NUMBERS)]
ZERO = {"a": np.zeros(1)}


@pytest.mark.parametrize(
    ("rule", "expected"), [(median, 4), (trimmed_mean, 14 / 3), (krum, 2), (partial(krum, select=3), 7 / 3)]
)
def test_five_clients_by_hand(rule, expected):
    assert rule(ZERO, FIVE)["a"] == pytest.approx(expected)
    assert median(ZERO, [FIVE[k] for k in (0, 1, 3, 4)])["a"] == 3


def test_a_share_is_the_decimal_number_that_was_typed():
    shares = [(0.29, 100), (0.2, 5), (0.2, 9), (0.07, 100)]
    assert [num_trimmed(beta, clients) for beta, clients in shares] == [29, 1, 1, 7]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 11])
def test_median_and_trimmed_mean_equal_numpy_and_scipy(number):
    start = model(0)
    clients = clients_of(start, number)
    stacks = {name: np.stack([client.layers[name] for client in clients]).astype(float) for name in start}
    cases = [(median(start, clients), partial(np.median, axis=0))]
    for beta in (0.1, 0.2, 0.3, 0.45):
        theirs = partial(scipy.stats.trim_mean, proportiontocut=beta, axis=0)
        cases.append((trimmed_mean(start, clients, beta=beta), theirs))
    for found, theirs in cases:
        for name, array in start.items():
            expected = theirs(stacks[name])
            expected = np.rint(expected) if array.dtype.kind == "i" else expected
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("poisoned", [0, 2, 4])
@pytest.mark.parametrize("factor", [1000, -1000])
@every_rule
def test_one_poisoned_client_does_not_move_the_result(rule, poisoned, factor):
    start = model(0)
    clients = clients_of(start, 5)
    clients[poisoned] = ClientUpdate(
        layers={
            name: array
            if array.dtype.kind == "i"
            else np.asarray(abs(factor) * array if "var" in name else factor * array)
            for name, array in clients[poisoned].layers.items()
        },
        partition_id=poisoned,
        num_examples=10,
    )
    honest = [client for client in clients if client.partition_id != poisoned]
    result, mean = rule(start, clients), fedavg(start, clients)
    for name, array in start.items():
        if array.dtype.kind == "f":
            values = np.stack([client.layers[name] for client in honest])
            assert (result[name] >= values.min(axis=0) - 1e-6).all(), name
            assert (result[name] <= values.max(axis=0) + 1e-6).all(), name
    assert np.abs(mean["fc.weight"]).max() > 20 * np.abs(result["fc.weight"]).max()


# --- refusals ---


@pytest.mark.parametrize("beta", [0, -0.1, 0.5, 1])
def test_shares_out_of_range_are_refused(beta):
    for refuses in (TrimmedMean, partial(trimmed_mean, ZERO, FIVE)):
        with pytest.raises(InputError, match=f"^strategy.beta={beta} must be a number above 0 and below 0.5$"):
            refuses(beta=beta)


@pytest.mark.parametrize("beta", [0.1, 0.2, 0.4])
def test_trimming_needs_a_client_to_trim(beta):
    min_clients = ceil(1 / beta)
    check_rules([TrimmedMean(beta=beta).problem], run_context(None, num_clients=10, clients_per_round=min_clients))
    context = run_context(None, num_clients=10, clients_per_round=min_clients - 1)
    with pytest.raises(InputError, match=f"beta={beta} of clients_per_round={min_clients - 1} is less than one"):
        check_rules([TrimmedMean(beta=beta).problem], context)


KINDS = [("median", Median, median), ("trimmed_mean", TrimmedMean, trimmed_mean), ("krum", Krum, krum)]


@pytest.mark.parametrize(("name", "kind", "rule"), KINDS)
def test_a_round_applies_the_rule_and_leaves_flowers_log_silent(tmp_path, caplog, name, kind, rule):
    caplog.set_level(logging.DEBUG, "flwr")
    federation = Federation(tmp_path, f"strategy={name}", "strategy.reported_metrics=[]", "num_clients=5")
    start = federation.layers
    result = federation.run(1)
    pairs = zip(federation.updates, federation.report.clients, strict=True)
    updates = [ClientUpdate.from_content(content, row.client) for content, row in pairs]
    assert type(federation.strategy) is kind
    assert same(result, rule(start, updates))
    assert all(not content["metrics"] for content in federation.updates)
    assert not any(record.name.startswith("flwr") for record in caplog.records)
    if name == "krum":
        (chosen,) = federation.report.strategy_metrics["selected"]
        assert same(result, updates[chosen].layers)


@pytest.mark.parametrize(
    ("strategy", "shift", "warning"),
    [
        # Left are clients 1, 2 and 4, which add their number to the global layers.
        (Median(), 2, None),
        (TrimmedMean(), 7 / 3, "only 3 updates are left, of which beta=0.2 trims none: a plain mean"),
        # One neighbour counts: clients 1 and 2 have the same distance to each other, and the first is taken.
        (Krum(), 1, "only 3 updates are left, but Krum with malicious=1 and select=1 needs 5 to be safe"),
    ],
    ids=["median", "trimmed_mean", "krum"],
)
def test_few_remaining_clients_are_a_warning(caplog, strategy, shift, warning):
    result, _ = run_round(strategy, [crash, good, good, crash, good])
    for name, array in LAYERS.items():
        np.testing.assert_allclose(result[name], array + shift, rtol=1e-6)
    said = [record.getMessage() for record in caplog.records if "dropped" not in record.getMessage()]
    assert said == ([] if warning is None else [warning])
