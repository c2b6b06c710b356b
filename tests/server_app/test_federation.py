"""Who takes part in a round, and where its messages go."""

import numpy as np

from server_app.federation import sample_clients
from strategies.fedavg import FedAvg
from tests.federation import Federation
from tests.server_app.test_round import configure, good, make_grid


def test_clients_are_drawn_by_seed_and_round_alone():
    draw = [sample_clients(3, round, num_clients=20, clients_per_round=5) for round in range(1, 200)]
    assert draw == [sample_clients(3, round, num_clients=20, clients_per_round=5) for round in range(1, 200)]
    assert all(len(set(clients)) == 5 and clients == sorted(clients) for clients in draw)
    assert draw[0] != draw[1] or draw[1] != draw[2]
    assert draw != [sample_clients(4, round, num_clients=20, clients_per_round=5) for round in range(1, 200)]
    # Each of the 20 clients is expected in 199 * 5 / 20 = 50 rounds, with a standard deviation of 6.
    counts = np.bincount(np.concatenate(draw), minlength=20)
    assert counts.min() > 50 - 5 * 6
    assert counts.max() < 50 + 5 * 6


def test_messages_go_to_the_nodes_of_the_chosen_partitions():
    grid = make_grid([good] * 6)
    messages = configure(FedAvg(), grid, clients_per_round=2).messages
    nodes = list(grid.get_node_ids())
    chosen = sample_clients(0, 1, num_clients=6, clients_per_round=2)
    assert [message.metadata.dst_node_id for message in messages] == [nodes[k] for k in chosen]


def test_late_updates_have_the_metrics_after_a_warm_up(tmp_path):
    """Use, in a round that weights by loss, updates whose plans are from rounds that weight by images."""
    overrides = ["strategy=l_dawa", "strategy.weighting=loss", "strategy.warmup_rounds=2", "num_clients=5"]
    rounds = Federation(
        tmp_path, *overrides, "dataset.limit=100", "aggregation.buffered=true", "aggregation.min_updates=2"
    )
    rounds.run(3)
    assert max(row.staleness for row in rounds.report.clients) > 0
    assert rounds.report.dropped == {}
