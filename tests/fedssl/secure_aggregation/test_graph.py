"""Bounds of SecAgg+: against exact fractions, published numbers and counted graphs; and the random graph."""

import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import networkx
import pytest

from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.errors import InputError
from fedssl.secure_aggregation.graph import SharingGraph, graph_for, random_neighbors, smallest_graph

DEFAULTS = {"corrupted_fraction": 0.2, "dropout_fraction": 0.2, "security_bits": 40, "correctness_bits": 30}


def choose_graph(clients, **settings):
    return graph_for(SecureAggregationSettings(clipping_range=1, **settings), clients)


def tail(population, successes, draws, start):
    """P[X >= start] for X ~ H(population, successes, draws), as an exact fraction."""
    others = population - successes
    ways = (math.comb(successes, count) * math.comb(others, draws - count) for count in range(start, draws + 1))
    return Fraction(sum(ways), math.comb(population, draws))


@pytest.mark.parametrize(
    ("clients", "neighbors", "threshold", "corrupted", "dropouts"),
    [(100, 40, 21, 20, 20), (100, 20, 16, 30, 40), (300, 80, 42, 60, 60), (30, 6, 4, 3, 6), (1000, 110, 58, 200, 200)],
)
def test_both_bounds_equal_exact_fractions(clients, neighbors, threshold, corrupted, dropouts):
    graph = SharingGraph(
        clients=clients, neighbors=neighbors, threshold=threshold, corrupted=corrupted, dropouts=dropouts
    )
    pairs = Fraction(clients * (clients - neighbors - 1), 2)
    removed = corrupted + dropouts
    apart = 0
    if removed >= neighbors:
        apart = Fraction(math.comb(clients - neighbors, removed - neighbors), math.comb(clients, removed))
    failure = clients * tail(clients - 1, corrupted, neighbors, threshold) + min(pairs * apart, 1)
    assert graph.security_bits == pytest.approx(max(-math.log2(failure), 0), rel=1e-9)
    # Fewer than t survivors among k neighbors are more than k - t among the D - 1 other dropouts.
    failure = clients * tail(clients - 1, dropouts - 1, neighbors, neighbors - threshold + 1)
    assert graph.correctness_bits == (pytest.approx(max(-math.log2(failure), 0), rel=1e-6) if failure else math.inf)


@pytest.mark.parametrize(
    ("clients", "corrupted", "dropouts", "neighbors", "threshold"),
    [
        (10_000, 0.33, 0.33, 422, 221),
        (1_000_000, 0.33, 0.33, 518, 270),
        (1_000, 0.33, 0.05, 78, 60),
        (10_000, 0.33, 0.05, 92, 70),
        (1_000_000, 0.33, 0.05, 110, 83),
    ],
)
def test_the_numbers_of_the_authors_implementation(clients, corrupted, dropouts, neighbors, threshold):
    """The tables of ``graph_parameter_finder_test.cc`` of google-parfait/federated-compute, against a curious server.

    It rounds fractions down, divides 2^-40 evenly between the two events (41 bits each), and has 20 bits of
    correctness.
    """
    graph = smallest_graph(
        SecureAggregationSettings(clipping_range=1, security_bits=41, correctness_bits=20),
        clients,
        corrupted=math.floor(corrupted * clients),
        dropouts=math.floor(dropouts * clients),
    )
    assert (graph.neighbors, graph.threshold) == (neighbors, threshold)


@pytest.mark.parametrize("clients", [60, 100])
def test_no_smaller_graph_satisfies_the_bounds(clients):
    graph = choose_graph(clients, **DEFAULTS)
    assert graph.security_bits >= 40
    assert graph.correctness_bits >= 30
    for neighbors in range(2, graph.neighbors, 2):
        for threshold in range(neighbors // 2 + 1, neighbors + 2):
            sizes = {"clients": clients, "neighbors": neighbors, "threshold": threshold}
            other = SharingGraph(**sizes, corrupted=graph.corrupted, dropouts=graph.dropouts)
            assert other.security_bits < 40 or other.correctness_bits < 30


@pytest.mark.parametrize(
    ("clients", "corrupted_fraction", "dropout_fraction", "remedy"),
    [
        (3, 0.2, 0.2, "dropout_fraction=0"),
        (3, 0.4, 0.2, "corrupted_fraction=0"),
        (4, 0.4, 0.2, "dropout_fraction=0"),
        (3, 0.4, 0.5, "dropout_fraction=0 secure_aggregation.corrupted_fraction=0"),
        (100, 0.6, 0.5, "dropout_fraction=0"),
    ],
)
def test_two_honest_clients_remain_or_the_sum_is_refused(clients, corrupted_fraction, dropout_fraction, remedy):
    """The sum over one honest client is its update. The setting that the sentence names works."""
    values = DEFAULTS | {"corrupted_fraction": corrupted_fraction, "dropout_fraction": dropout_fraction}
    with pytest.raises(InputError, match=f"is not possible with .* set secure_aggregation.{remedy}, or take more"):
        choose_graph(clients, **values)
    names = [setting.removeprefix("secure_aggregation.").partition("=")[0] for setting in remedy.split()]
    assert choose_graph(clients, **values | dict.fromkeys(names, 0)).honest_survivors >= 2


def test_the_threshold_leaves_two_honest_clients():
    """5 clients, 2 corrupted: a threshold of 3 would tolerate 2 dropouts, and leave one honest client."""
    graph = choose_graph(5, **DEFAULTS | {"corrupted_fraction": 0.4})
    assert (graph.threshold, graph.max_dropouts, graph.honest_survivors) == (4, 1, 2)
    assert replace(graph, threshold=3).security_bits == 0
    for clients in range(3, 60):
        for corrupted, dropouts in itertools.product((0, 0.1, 0.34, 0.5), repeat=2):
            with suppress(InputError):
                values = {"corrupted_fraction": corrupted, "dropout_fraction": dropouts}
                graph = choose_graph(clients, **DEFAULTS | values)
                assert clients - graph.corrupted - graph.max_dropouts >= 2


def test_the_bound_on_disconnection_exceeds_the_counted_probability():
    """All sets of 4 removed among 9 nodes with 4 neighbors: the honest survivors fall apart in some of them."""
    clients, neighbors, removed = 9, 4, 4
    edges = random_neighbors(range(clients), neighbors)
    graph = networkx.Graph((node, other) for node, others in edges.items() for other in others - {node})
    sets = list(itertools.combinations(range(clients), removed))
    apart = sum(not networkx.is_connected(graph.subgraph(set(range(clients)) - set(nodes))) for nodes in sets)
    # 9 (9 - 4 - 1) / 2 = 18 pairs of places, each with one set of 4: all of them disconnect, and no other does.
    assert apart == 18
    bound = SharingGraph(clients=clients, neighbors=neighbors, threshold=4, corrupted=2, dropouts=2).disconnection
    assert bound == pytest.approx(18 / len(sets))


@pytest.mark.parametrize(("clients", "neighbors"), [(9, 4), (20, 10), (7, 6)])
def test_the_random_graph_is_a_harary_graph_in_random_order(clients, neighbors):
    nodes = [1000 + 7 * node for node in range(clients)]
    edges = random_neighbors(nodes, neighbors)
    assert all(node in others and len(others) == neighbors + 1 for node, others in edges.items())
    assert all(node in edges[other] for node, others in edges.items() for other in others)
    graph = networkx.Graph((node, other) for node, others in edges.items() for other in others - {node})
    assert networkx.is_isomorphic(graph, networkx.hkn_harary_graph(neighbors, clients))


def test_no_seed_makes_neighbors_predictable():
    """Two orders of 100 nodes on a circle have the same edges with a probability of 200 / 100!."""
    graphs = []
    for _ in range(2):
        random.seed(0)
        graphs.append(random_neighbors(range(100), 4))
    assert graphs[0] != graphs[1]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"neighbors": 11}, "secure_aggregation.neighbors=11 but 100 clients on a circle have an even number"),
        ({"neighbors": 20}, "set secure_aggregation.neighbors=40 and secure_aggregation.threshold=21, or both to null"),
        ({"threshold": 42}, "secure_aggregation.threshold=42 but a client has 41 shares"),
        ({"threshold": 20}, "has 0 security bits"),
        ({"threshold": 41}, "and 0 correctness bits, but 40 and 30 are needed"),
    ],
)
def test_a_choice_below_the_bounds_is_refused(values, sentence):
    with pytest.raises(InputError, match=sentence):
        choose_graph(100, **{**DEFAULTS, **values})
