"""A method's server side under every averaging rule: Orchestra's centroids, and parts for it that cannot be used."""

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedssl.wire.records import arrays_to_record
from server_app.messaging import receive
from server_app.round import Round
from strategies.types import GLOBAL
from tests.cases import some
from tests.federation import Federation, finish
from tests.methods import overrides_of

RULES = ["fedavg", "l_dawa", "eua", "euc", "median", "local_only", "per_ssl"]  # kinds of aggregation and of exchange
SMALL = ["batch_size=16", "method=orchestra"]
SMALL += ["method.local_clusters=3", "method.global_clusters=5", "method.queue_size=24"]
SMALL += ["method.projector.hidden_dim=16", "method.projector.out_dim=8"]


def normalised(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def clustered_slowly(local, *, clusters):
    """k-means on the sphere with assignments by Sinkhorn-Knopp, in float64, number by number."""
    points = normalised(local.astype(float))
    mean = points.mean(axis=0)
    chosen = [min(range(len(points)), key=lambda i: points[i] @ mean)]
    while len(chosen) < min(clusters, len(points)):
        others = [i for i in range(len(points)) if i not in chosen]
        chosen.append(min(others, key=lambda i: max(points[i] @ points[j] for j in chosen)))
    centroids = np.array([points[chosen[k % len(chosen)]] for k in range(clusters)])
    for _ in range(5):
        share = np.exp(25 * points @ centroids.T)
        for _ in range(10):
            share = share / share.sum(axis=0)
            share = share / share.sum(axis=1, keepdims=True)
        nearest = share.argmax(axis=1)
        for k in range(clusters):
            members = points[nearest == k].sum(axis=0)
            if members.any():
                centroids[k] = normalised(members)
    return centroids


@pytest.mark.parametrize("rule", some(RULES, default=["per_ssl"]))
def test_centroids_are_gathered_and_shared_under_every_rule(tmp_path, rule):
    federation = Federation(tmp_path, *SMALL, f"strategy={rule}")
    given = {}
    for _ in range(2):
        federation.run(1)
        assert federation.report.dropped == {}
        rows = federation.report.clients
        assert [row.client for row in rows] == [0, 1, 2]
        plans, updates = federation.plans[-3:], federation.updates[-3:]
        for row, plan, update in zip(rows, plans, updates, strict=True):
            for record in (plan["arrays"], update["arrays"]):
                assert not any("centroids" in name or "memory" in name for name in record)
            assert set(plan["method-broadcast"]) == {"centroids"}
            assert set(update["method-upload"]) == {"local_centroids"}
            expected = given.get(row.model)
            found = plan["method-broadcast"]["centroids"].numpy()
            assert not found.any() if expected is None else np.array_equal(found, expected)
        for name, model in federation.state.models.items():
            assert not any("centroids" in layer or "memory" in layer for layer in model.layers)
            pairs = zip(rows, updates, strict=True)
            local = [update["method-upload"]["local_centroids"].numpy() for row, update in pairs if row.model == name]
            assert len(local) == (1 if rule == "local_only" else 3)
            slow = clustered_slowly(np.concatenate(local), clusters=5)
            np.testing.assert_allclose(model.broadcast["centroids"], slow, atol=1e-6)
            given[name] = model.broadcast["centroids"].copy()
        assert len(given) == (3 if rule == "local_only" else 1)
    sent = [update["method-upload"]["local_centroids"].numpy() for update in federation.updates]
    assert all(one.any() and not np.array_equal(one, other) for one, other in zip(sent[:3], sent[3:], strict=True))


def misshapen(gathered):
    return {name: array[:-1] for name, array in gathered.items()}


def not_finite(gathered):
    bad = {name: array.copy() for name, array in gathered.items()}
    bad["local_centroids"][-1, -1] = np.nan
    return bad


def more(gathered):
    return {**gathered, "centroids": np.zeros((5, 8), np.float32)}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (misshapen, "layer local_centroids has shape (2, 8) instead of (3, 8)"),
        (not_finite, "layer local_centroids has values that are not finite, or far too large"),
        (more, "layer centroids is not part of the global model"),
        (None, "record 'method-upload' is missing"),
    ],
)
def test_a_part_that_cannot_be_used_drops_the_client(tmp_path, spoil, reason):
    federation = Federation(tmp_path, *SMALL, "strategy=fedavg")
    one = Round(federation.components.federation, federation.state)
    replies = list(receive(federation.grid, one.messages, timeout=60))
    local = [reply.content["method-upload"]["local_centroids"].numpy() for reply in replies]
    content = replies[1].content
    if spoil is None:
        del content["method-upload"]
    else:
        gathered = {"local_centroids": local[1]}
        content["method-upload"] = arrays_to_record(spoil(gathered)) if spoil(gathered) else ArrayRecord()
    state, report = finish(one, replies)
    assert report.dropped == {1: reason}
    assert [row.client for row in report.clients] == [0, 2]
    slow = clustered_slowly(np.concatenate([local[0], local[2]]), clusters=5)
    np.testing.assert_allclose(state.models[GLOBAL].broadcast["centroids"], slow, atol=1e-6)


SERVER_SIDES = {"orchestra": SMALL, "fedca": ["method=fedca"], "fedsc": ["method=fedsc"], "mar": overrides_of("mar")}


@pytest.mark.parametrize("method", some(SERVER_SIDES, default=["orchestra"]))
def test_static_parts_stay_beside_those_of_the_method(tmp_path, method):
    """The initial encoder, which clients that participate for the first time in a later round need as well."""
    overrides = [
        *SERVER_SIDES[method],
        "regularizer=l2_sp",
        "num_clients=4",
        "clients_per_round=2",
        "dataset.limit=100",
    ]
    federation = Federation(tmp_path, *overrides)
    sent = {*federation.components.context.initial_model().broadcast}
    assert any(name.startswith("initial_encoder.") for name in sent)
    for _ in range(3):
        federation.run(1)
        assert federation.report.dropped == {}
        assert set(federation.state.models[GLOBAL].broadcast) == sent
    assert len(federation.state.last_participation) > 2
