"""FedAvg, Loss, L-DAWA, M-DAWA: Eqs. 1-6 of L-DAWA by hand, for the two clients in `tests.strategies.made`."""

from functools import partial

import numpy as np
import pytest

from strategies.aggregate import aggregate
from strategies.fedavg import fedavg
from strategies.l_dawa import LDAWA, l_dawa
from strategies.loss_weighted import loss_weighted
from strategies.m_dawa import m_dawa
from strategies.types import AggregatedModel, GlobalModel
from tests.contexts import run_context
from tests.strategies.made import CLIENTS, DELTA, GLOBAL, update


@pytest.mark.parametrize(
    ("rule", "a", "b"),
    [
        # Eq. 1, beta = n_k / n: a = (4 + 3*3, 3 + 3*4) / 4, b = (3*12, 12) / 4
        (fedavg, [3.25, 3.75], [9, 3]),
        # Eq. 1, beta = 1/K: a = (4 + 3, 3 + 4) / 2, b = (12, 12) / 2
        (partial(fedavg, weighting="uniform"), [3.5, 3.5], [6, 6]),
        # softmax of (-ln 3, 0) is (1/4, 3/4)
        (loss_weighted, [3.25, 3.75], [9, 3]),
        # The cosines only weigh: a = (0.96 * 4 + 3, 0.96 * 3 + 4) / (0.96 + 1), b = (0 + 12, 0 + 0) / (0 + 1)
        (partial(l_dawa, normalize=True), [6.84 / 1.96, 6.88 / 1.96], [12, 0]),
        # Eqs. 2-3: (24/169 w_0 + w_1) / 2
        (m_dawa, [(4 * DELTA + 3) / 2, (3 * DELTA + 4) / 2], [6, 6 * DELTA]),
        # Eq. 4: a = (0.96 * 4 + 3, 0.96 * 3 + 4) / 2, b = (0 + 12, 0 * 12 + 0) / 2
        (l_dawa, [3.42, 3.44], [6, 0]),
        # Eq. 5: a = (0.96 * 4 + 3*3, 0.96 * 3 + 3*4) / 4, b = (3*12, 0) / 4
        (partial(l_dawa, weighting="examples"), [3.21, 3.72], [9, 0]),
        # Eq. 6: beta is again (1/4, 3/4)
        (partial(l_dawa, weighting="loss"), [3.21, 3.72], [9, 0]),
    ],
    ids=["Eq. 1 examples", "Eq. 1 uniform", "loss", "normalize", "Eqs. 2-3", "Eq. 4", "Eq. 5", "Eq. 6"],
)
def test_two_clients_by_hand(rule, a, b):
    result = rule(GLOBAL, CLIENTS)
    np.testing.assert_allclose(result["a"], a, rtol=1e-6)
    np.testing.assert_allclose(result["b"], b, rtol=1e-6, atol=1e-7)


def test_buffers_and_counters_by_hand():
    # running_var goes (3, 4) -> (4, 3), cosine 0.96, and (3, 4), cosine 1; the weight, [1] -> [-1] and [1], gives the
    # model cosines -1 and 1. Counter: (10 + 3 * 13) / 4 = 12.25.
    start = {"bn.weight": np.ones(1), "bn.running_var": np.array([3.0, 4.0]), "bn.num_batches_tracked": np.array(7)}
    turned = {**start, "bn.weight": -np.ones(1), "bn.running_var": np.array([4.0, 3.0])}
    clients = [update(0, turned, num_examples=1), update(1, start, num_examples=3)]
    for client, counter in zip(clients, (10, 13), strict=True):
        client.layers["bn.num_batches_tracked"] = np.array(counter)
    for rule, variance in (
        (l_dawa, [3.5, 3.5]),
        (partial(l_dawa, buffers="scale"), [(0.96 * 4 + 3) / 2, (0.96 * 3 + 4) / 2]),
        (m_dawa, [3.5, 3.5]),
        (partial(m_dawa, buffers="scale"), [(-4 + 3) / 2, (-3 + 4) / 2]),
    ):
        result = rule(start, clients)
        np.testing.assert_allclose(result["bn.running_var"], variance)
        np.testing.assert_allclose(result["bn.weight"], [1])  # the opposite client has its sign flipped
        assert result["bn.num_batches_tracked"] == 12  # 11.5, rounded to even
    for n, expected in ((3, 12), (9, 13)):  # 12.25 and 12.7: to the nearest, not cut off
        clients[1] = update(1, clients[1].layers, num_examples=n)
        counter = fedavg(start, clients)["bn.num_batches_tracked"]
        assert (counter, counter.dtype, counter.shape) == (expected, start["bn.num_batches_tracked"].dtype, ())


@pytest.mark.parametrize(("warmup", "warns"), [(2, False), (3, True)])
def test_a_run_of_warm_up_alone_is_a_warning(caplog, warmup, warns):
    LDAWA(warmup_rounds=warmup).server.prepare(run_context(None, rounds=3))
    assert ("strategy.warmup_rounds=3 are all rounds=3, which are federated averaging" in caplog.text) == warns


def test_a_warning_once_if_a_kernel_shrinks(caplog):
    """Two clients turn the kernel (3, 4) by 90 degrees each way: cosines are 0. A turned bias gives no warning."""
    before = {"kernel": np.array([[3.0, 4.0]]), "zero": np.zeros((2, 2)), "bias": np.array([3.0, 4.0])}
    turned = [np.array([[-4.0, 3.0]]), np.array([[4.0, -3.0]])]
    kept = [before["kernel"], np.array([[4.0, 3.0]])]  # cosines 1 and 0.96: norm of ((3, 4) + 0.96 (4, 3)) / 2 is 4.85

    def after(strategy, round, kernels):
        turned_bias = {**before, "bias": -before["bias"]}
        clients = [update(k, {**turned_bias, "kernel": w}, num_examples=1) for k, w in enumerate(kernels)]
        aggregator = strategy.server.aggregator(round)
        layers = aggregate(before, clients, aggregator)
        model = GlobalModel(layers=before)
        done = AggregatedModel(
            model=model, round=round, layers=layers, aggregator=aggregator, received={}, num_clients=2
        )
        strategy.server.after_aggregation(done)
        return [record.getMessage() for record in caplog.records]

    strategy = LDAWA(warmup_rounds=1)
    assert after(strategy, 1, turned) == after(strategy, 2, kept) == []
    (warning,) = after(strategy, 3, turned)
    assert warning.startswith("L-DAWA has multiplied the norm of kernel by 0.00 in round 3; ")
    assert "set strategy.normalize=true (in Python normalize=True), or a smaller learning rate" in warning
    assert after(strategy, 4, turned) == [warning]
    caplog.clear()
    assert after(LDAWA(normalize=True), 1, kept) == []
    for options in ({"normalize": True}, {"scale_at": "client"}):  # which has it, and which cannot have it
        caplog.clear()
        (warning,) = after(LDAWA(**options), 1, [kernel / 2 for kernel in kept])
        assert warning.endswith(
            "layers with small cosines shrink more and more: set a smaller learning rate of the clients"
        )
