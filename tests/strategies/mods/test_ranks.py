"""Clients of smaller ranks: the factors that they exchange, and their limits."""

from types import SimpleNamespace

import numpy as np

from fedssl.model_arrays import exchanged_layers
from fedssl.wire.messages import TrainPlan
from strategies.fedavg import FedAvg
from strategies.mods.ranks import Ranks
from strategies.round_start import RoundStart
from strategies.types import GLOBAL, ServerState
from tests.arrays import same
from tests.server_app.test_round import make_grid
from tests.strategies.mods.test_products import CLIENTS, FC, Tuned, federation, run, total, trained


def test_clients_of_smaller_ranks_exchange_the_leading_factors():
    # Client k has the rank 1 or 2. What it uploads is a product of its rank, and the new product the nearest of rank 2.
    layers = exchanged_layers(Tuned("svd"))
    for round in (1, 2):
        sent = [{**layers, FC.a: layers[FC.a][:rank], FC.b: layers[FC.b][:, :rank]} for rank in (1, 2, 1, 2, 1)]
        state, report, messages = run(FedAvg(weighting="uniform"), "svd", rounds=round, ranks=(1, 2))
        assert not report.dropped
        for message, expected in zip(messages[-CLIENTS:], sent, strict=True):
            received = TrainPlan.from_content(message.content).layers
            assert same(received, expected)
        uploads = [trained(one, client) for client, one in enumerate(sent)]
        mean = sum(FC.scale * one[FC.b] @ one[FC.a] for one in uploads) / CLIENTS
        u, s, vt = np.linalg.svd(mean)
        layers = state.models[GLOBAL].layers
        np.testing.assert_allclose(total(layers, 0), (u[:, :2] * s[:2]) @ vt[:2], rtol=1e-9, atol=1e-9)
        assert report.clients[0].bytes_up < report.clients[1].bytes_up
        assert report.clients[0].bytes_down < report.clients[1].bytes_down
        # From now on, what a client of rank 1 receives is the nearest product of rank 1.
        np.testing.assert_allclose(
            FC.scale * layers[FC.b][:, :1] @ layers[FC.a][:1], s[0] * np.outer(u[:, 0], vt[0]), rtol=1e-9, atol=1e-9
        )


def test_an_update_of_another_rank_than_the_clients_is_dropped():
    def of_rank_2(layers, partition):
        return trained(layers, partition) | {FC.a: np.zeros((2, 7)), FC.b: np.zeros((5, 2))}

    _, report, _ = run(FedAvg(), "svd", behaviors=[of_rank_2, *[trained] * 4], ranks=(1, 2))
    assert list(report.dropped) == [0]
    assert "layer encoder.fc.lora_A has shape (2, 7) instead of (1, 7)" in report.dropped[0]


def test_the_rank_of_a_client_is_at_most_its_limit():
    def ranks_of(aggregation, ranks, limits):
        clients = federation(make_grid([trained] * 4), FedAvg(), aggregation, ranks)
        info = {clients.nodes[client]: SimpleNamespace(max_rank=limit) for client, limit in limits.items()}
        at = RoundStart(context=clients.context, state=ServerState(), nodes=clients.nodes, info=info)
        return [Ranks(clients.context).variant(client, at) for client in range(4)]

    assert ranks_of("svd", (1, 2), {0: 2, 1: 1}) == [1, 1, 1, 2]
    assert ranks_of("stack", (), {0: 9, 1: 1}) == [2, 1, None, None]  # the rank of the model is 2
    assert ranks_of("factors", (), {0: 1}) == [None] * 4
