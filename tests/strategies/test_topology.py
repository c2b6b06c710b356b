"""Topologies: graphs by hand, Metropolis weights by hand and in general, how fast clients agree, what is refused."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedssl.errors import InputError
from strategies.topology import (
    SERVER,
    TOPOLOGIES,
    describe,
    make_graph,
    metropolis_weights,
    node_positions,
    plot_topology,
    read_edges,
    second_eigenvalue,
    weight_matrix,
)
from tests.cases import some

OPTIONS = {"random_regular": {"degree": 3}, "erdos_renyi": {"probability": 0.4}}


def make(kind, num_clients, folder=None, **options):
    if kind == "file":
        file = folder / "edges.txt"
        file.write_text("".join(f"0 {client}\n" for client in range(1, num_clients)))
        options = {"file": file}
    return make_graph(kind, num_clients, **{**OPTIONS.get(kind, {}), **options})


def edges(graph):
    return {frozenset(edge) for edge in graph.edges}


def pairs(*overrides):
    return {frozenset(map(int, word)) for word in overrides}


def test_small_graphs_by_hand():
    assert edges(make("ring", 2)) == pairs("01")
    assert edges(make("ring", 5)) == pairs("01", "12", "23", "34", "40")
    assert edges(make("complete", 4)) == pairs("01", "02", "03", "12", "13", "23")
    assert edges(make("star", 2)) == {frozenset((0, SERVER)), frozenset((1, SERVER))}
    # 0 1 2     0 1 2 3
    # 3 4       4 5 6 7
    #           8 9
    assert edges(make("grid", 5)) == pairs("01", "12", "34", "03", "14")
    ten = pairs("01", "12", "23", "45", "56", "67", "89", "04", "15", "26", "37", "48", "59")
    assert edges(make("grid", 10)) == ten
    assert edges(make("grid", 3)) == pairs("01", "12")


def test_random_graphs_are_those_of_the_seed():
    for kind in ("random_regular", "erdos_renyi"):
        first, again, other = (edges(make(kind, 20, seed=seed)) for seed in (1, 1, 2))
        assert first == again != other
    assert {degree for _, degree in make("random_regular", 20).degree} == {3}


def test_a_file_of_edges(tmp_path):
    file = tmp_path / "edges.txt"
    file.write_text("# five clients\n0 1  # a neighbour\n\n  2\t1\n3 2\r\n4 3\n")
    assert read_edges(file, 5) == [(0, 1), (1, 2), (2, 3), (3, 4)]  # the smaller number first
    assert edges(make_graph("file", 5, file=str(file))) == pairs("01", "12", "23", "34")


@pytest.mark.parametrize("kind", [kind for kind in TOPOLOGIES if kind != "file"])
def test_a_graph_joins_the_clients_that_train(kind, tmp_path):
    """It is that of fewer clients with other names, also in its weights and in the figure."""
    trained = [0, 2, 3, 4, 6, 8, 9, 10]
    graph, fewer = make(kind, 11, untrained=frozenset({1, 5, 7})), make(kind, 8)
    assert nx.is_connected(graph)
    names = {**dict(enumerate(trained)), SERVER: SERVER}
    assert edges(graph) == {frozenset(names[node] for node in edge) for edge in edges(fewer)}
    assert describe(graph) == describe(fewer)
    places = node_positions(fewer)
    moved = {names[node]: place for node, place in places.items()}
    assert node_positions(graph) == {node: pytest.approx(place, abs=1e-6) for node, place in moved.items()}
    plot_topology(graph, tmp_path / "topology.png")


def test_a_file_must_join_the_clients_that_train(tmp_path):
    file = tmp_path / "edges.txt"
    file.write_text("0 3\n1 3\n2 3\n0 1\n")
    graph = make_graph("file", 4, untrained={2}, file=file)
    assert (list(graph), edges(graph)) == ([0, 1, 3], pairs("03", "13", "01"))
    with pytest.raises(InputError, match="without client 3, which never trains, has no edge for client 2; every"):
        make_graph("file", 4, untrained={3}, file=file)
    file.write_text("0 1\n1 2\n2 3\n3 4\n4 5\n")
    with pytest.raises(InputError, match="without clients 2, 5, which never train, has 2 pieces .* 0, 1; add"):
        make_graph("file", 6, untrained={2, 5}, file=file)


@pytest.mark.parametrize(
    ("degree", "sentence"),
    [(5, "from 1 to 4, one less than the 5 clients that train;"), (3, "with the 5 clients that train is not possible")],
)
def test_neighbors_are_counted_among_the_clients_that_train(degree, sentence):
    with pytest.raises(InputError, match=sentence):
        make_graph("random_regular", 7, untrained={0, 3}, degree=degree)


def test_a_path_of_three_by_hand():
    """Degrees 1, 2, 1: both edges weigh 1 / (1 + 2). Eigenvectors (1, 1, 1), (1, 0, -1), (1, -2, 1): 1, 2/3, 0."""
    weights = metropolis_weights(nx.path_graph(3))
    assert list(weights) == [0, 1, 2]
    expected = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
    np.testing.assert_allclose(weight_matrix(weights), expected, rtol=1e-15)
    assert list(weights[1]) == [0, 1, 2]
    assert list(weights[0]) == [0, 1]
    assert second_eigenvalue(weight_matrix(weights)) == pytest.approx(2 / 3)


@st.composite
def graphs(draw):
    nodes = draw(st.integers(1, 12))
    possible = [(i, j) for i in range(nodes) for j in range(i)]
    graph = nx.empty_graph(nodes)
    graph.add_edges_from(draw(st.lists(st.sampled_from(possible), unique=True)) if possible else [])
    return graph


@given(graphs())
def test_weights_are_symmetric_and_doubly_stochastic(graph):
    weights = metropolis_weights(graph)
    matrix = weight_matrix(weights)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-12)
    assert all(weight > 0 for row in weights.values() for weight in row.values())
    assert {node: set(row) for node, row in weights.items()} == {node: {node, *graph[node]} for node in graph}
    assert 0 <= second_eigenvalue(matrix) <= 1 + 1e-12


@pytest.mark.parametrize(
    ("kind", "num_clients", "options", "sentence"),
    [
        ("random_regular", 4, {"degree": None}, "strategy.topology=random_regular needs strategy.degree"),
        ("random_regular", 4, {"degree": 4}, r"strategy.degree=4 but it must be a whole number from 1 to 3"),
        ("random_regular", 4, {"degree": 0}, "strategy.degree=0 but it must be a whole number from 1"),
        ("random_regular", 5, {"degree": 3}, "strategy.degree=3 with num_clients=5 is not possible"),
        ("random_regular", 8, {"degree": 1}, "none of 100 random graphs is connected with strategy.degree=1;"),
        ("erdos_renyi", 4, {"probability": None}, "strategy.topology=erdos_renyi needs strategy.probability"),
        (
            "erdos_renyi",
            50,
            {"probability": 0.01},
            "none of 100 random graphs is connected with strategy.probability=0.01, while",
        ),
    ],
)
def test_what_gives_no_graph_is_refused(kind, num_clients, options, sentence):
    with pytest.raises(InputError, match=sentence):
        make(kind, num_clients, **options)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0 1\n1 4\n", r"edges.txt, line 2: there is no client 4; the 4 clients are 0 to 3"),
        ("0 1\n# ...\n2 2\n", "line 3: client 2 is joined to itself"),
        ("0 1\n1 2\n2 1\n", "line 3: the edge 1 2 is there already, in line 2; remove one"),
        ("0 1 2\n", "line 1: '0 1 2' is no edge; write the numbers of two clients"),
        ("0 -1\n", "line 1: '0 -1' is no edge"),
        ("0 1e0\n", "no edge"),
        ("0 " + 5000 * "9", "no edge"),
        ("0 \x1b[2J\n", r"line 1: '0  \[2J' is no edge"),
        ("0 1\n1 2\n", "has no edge for client 3; every client needs a neighbor"),
        ("", "has no edge for clients 0, 1, 2, 3; every"),
        ("0 1\n2 3\n", "has 2 pieces with no edge between them, one of clients 0, 1; add edges that join them"),
    ],
)
def test_a_file_that_holds_no_topology_is_refused(tmp_path, text, sentence):
    file = tmp_path / "edges.txt"
    file.write_text(text)
    with pytest.raises(InputError, match=sentence):
        make_graph("file", 4, file=file)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(InputError, match=r"strategy.topology=file needs strategy.file"):
        make_graph("file", 4)
    with pytest.raises(InputError, match=r"strategy.file=/nowhere does not exist"):
        make_graph("file", 4, file="/nowhere")
    (tmp_path / "edges").write_text("0 1\r\n1 2\r\n2 3\r\n", encoding="utf-8-sig")
    assert make_graph("file", 4, file=tmp_path / "edges").number_of_edges() == 3
    (tmp_path / "edges").write_bytes(b"\xff\x00")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        make_graph("file", 4, file=tmp_path / "edges")
    with pytest.raises(InputError, match="not a regular file"):
        make_graph("file", 4, file=tmp_path)


@pytest.mark.parametrize("kind", some(TOPOLOGIES, default=["grid", "file"]))
def test_figures_are_drawn_and_labelled(kind, tmp_path):
    graph = make(kind, 12, tmp_path)
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "figures" / "topology.png"
    plot_topology(graph, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    place = node_positions(graph)
    assert set(place) == set(graph)
    assert len(set(place.values())) == len(graph)
    assert place == node_positions(make(kind, 12, tmp_path))
