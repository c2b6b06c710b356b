"""Topologies of decentralized learning: graphs over the clients, mixing weights of neighbors, and their plot.

Graphs are networkx graphs whose nodes are the ids of the clients, without those that never train: they send no model,
so that neighbors on both sides of them would not be joined. A star has another node, its hub `SERVER`, because a star
over the server is federated averaging.

Weights are Metropolis-Hastings' (Xiao, Boyd and Lall, *Distributed average consensus with time-varying Metropolis
weights*, 2006). A client needs only its own degree and those of its neighbors, and the matrix is symmetric and doubly
stochastic, so that mixing preserves the mean. Asymptotically every step shrinks differences by the second eigenvalue.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedssl.errors import InputError, sanitize, shortened
from fedssl.plots.style import new_figure, write_png
from fedssl.safe_io import read_text
from fedssl.seeding import derive_seed

if TYPE_CHECKING:
    import networkx as nx

TOPOLOGIES = ("ring", "grid", "star", "complete", "random_regular", "erdos_renyi", "file")
SERVER = "server"  # hub of a star
MAX_DRAWS = 100  # random graphs until a connected one
_MAX_PAIRS = 5_000_000  # of clients, in graphs that consider all pairs; an edge needs about 300 bytes

Weights = dict[int, dict[int, float]]

# Two colors of Okabe and Ito, safe for color blindness. The server also has another shape.
_CLIENT, _SERVER, _EDGE = "#0072B2", "#E69F00", "0.6"
_MAX_LABELED = 100  # clients; more labels would not be legible
MAX_CLIENTS = 1000  # of a plot: layout and eigenvalues need the square of their number in memory and more in time

Point = tuple[float, float]


def make_graph(
    topology: str,
    num_clients: int,
    *,
    untrained: Collection[int] = (),
    seed: int = 0,
    degree: int | None = None,
    probability: float | None = None,
    file: str | Path | None = None,
) -> "nx.Graph":
    """Return a connected graph over the clients that are not ``untrained``. ``graph.graph["topology"]`` is its kind.

    ``topology`` is one of `TOPOLOGIES`. grid: at most floor(sqrt(n)) rows, row by row, without wraparound; the last row
    may be shorter. star: every client and `SERVER`. random_regular: every client has ``degree`` neighbors. erdos_renyi:
    every pair is joined with ``probability`` in (0, 1]. file: see `read_edges`. Random graphs are resampled, up to
    `MAX_DRAWS` times, until they are connected; a seed gives the same graph with the same version of networkx.
    """
    import networkx as nx  # here: the import is slow, and few strategies need it

    for setting, value, owner in (
        ("degree", degree, "random_regular"),
        ("probability", probability, "erdos_renyi"),
        ("file", file, "file"),
    ):
        if value is not None and topology != owner:
            raise InputError(
                f"strategy.{setting}={value} is for strategy.topology={owner}, and it is {topology}; set one of the two"
            )
    clients = [client for client in range(num_clients) if client not in untrained]
    number = len(clients)
    counted = f"the {number} clients that train" if untrained else f"num_clients={num_clients}"
    num_pairs = number * (number - 1) // 2
    if topology in ("complete", "erdos_renyi") and num_pairs > _MAX_PAIRS:
        raise InputError(
            f"strategy.topology={topology} considers {num_pairs:,} pairs of {counted}, more than "
            f"{_MAX_PAIRS:,}; set strategy.topology=random_regular strategy.degree=8"
        )
    if topology == "file":
        graph = nx.empty_graph(clients)
        graph.add_edges_from(read_edges(file, num_clients, untrained=untrained))
    elif topology == "random_regular":
        _check_degree(degree, number, counted)
        graph = _connected(
            lambda draw: nx.random_regular_graph(degree, number, seed=derive_seed(seed, "topology", draw)),
            f"strategy.degree={degree}",
        )
    elif topology == "erdos_renyi":
        if probability is None:
            raise InputError("strategy.topology=erdos_renyi needs strategy.probability, that of an edge; set it")
        graph = _connected(
            lambda draw: nx.gnp_random_graph(number, probability, seed=derive_seed(seed, "topology", draw)),
            f"strategy.probability={probability}, while {math.log(number) / number:.2g} is where graphs of "
            f"{number} clients begin to be connected",
        )
    else:
        graph = nx.empty_graph(number)
        graph.add_edges_from(_edges(topology, number))
    if untrained and topology != "file":
        graph = nx.relabel_nodes(graph, dict(enumerate(clients)))
    graph.graph["topology"] = topology
    return graph


def metropolis_weights(graph: "nx.Graph") -> Weights:
    """Return the mixing weights ``W_ij = 1 / (1 + max(d_i, d_j))``, ``W_ii = 1 - sum_j W_ij``, d the degrees.

    For each node, they are those of itself and its neighbors, in ascending order of nodes, positive, and sum to 1.
    """
    weights: Weights = {}
    for node in sorted(graph):
        neighbors = {other: 1 / (1 + max(graph.degree[node], graph.degree[other])) for other in graph[node]}
        weights[node] = dict(sorted({**neighbors, node: 1 - math.fsum(neighbors.values())}.items()))
    return weights


def weight_matrix(weights: Mapping[int, Mapping[int, float]]) -> np.ndarray:
    """Return the weights as a matrix, float64, ``(n, n)``. Rows and columns are the clients in ascending order."""
    clients = sorted(weights)
    return np.array([[weights[client].get(other, 0.0) for other in clients] for client in clients])


def second_eigenvalue(matrix: np.ndarray) -> float:
    """Return the second largest absolute eigenvalue in [0, 1]: the asymptotic factor of differences per mixing step.

    ``matrix`` ``(n, n)`` is symmetric and doubly stochastic. 0: all models are equal after one step. 1: the graph is
    not connected.
    """
    ascending = np.linalg.eigvalsh(matrix)
    return float(np.abs(ascending[:-1]).max(initial=0.0))


def grid_columns(num_clients: int) -> int:
    """Return the number of columns of the grid, which has at most floor(sqrt(n)) rows."""
    return -(-num_clients // math.isqrt(num_clients))


def _edges(topology: str, num_clients: int) -> Iterator[tuple[int, int | str]]:
    if topology == "ring":
        yield from pairwise(range(num_clients))
        if num_clients > 2:
            yield (num_clients - 1, 0)
    elif topology == "grid":
        columns = grid_columns(num_clients)
        yield from (pair for pair in pairwise(range(num_clients)) if pair[1] % columns)
        yield from ((client, client + columns) for client in range(num_clients - columns))
    elif topology == "star":
        yield from ((client, SERVER) for client in range(num_clients))
    else:
        yield from combinations(range(num_clients), 2)


def _connected(draw: Callable[[int], "nx.Graph"], setting: str) -> "nx.Graph":
    """Return the first connected graph of `MAX_DRAWS` random ones."""
    import networkx as nx

    for number in range(MAX_DRAWS):
        graph = draw(number)
        if nx.is_connected(graph):
            return graph
    raise InputError(
        f"none of {MAX_DRAWS} random graphs is connected with {setting}; set a larger one, or another seed"
    )


def _check_degree(degree: int | None, number: int, counted: str) -> None:
    if degree is None:
        raise InputError("strategy.topology=random_regular needs strategy.degree, the neighbors of a client; set it")
    if number < 2:
        raise InputError("strategy.topology=random_regular needs 2 clients that train, and there is 1; add images")
    if type(degree) is not int or not 1 <= degree < number:
        raise InputError(
            f"strategy.degree={degree} but it must be a whole number from 1 to {number - 1}, one less than "
            f"{counted}; set another one, or more clients"
        )
    if degree * number % 2:
        raise InputError(
            f"strategy.degree={degree} with {counted} is not possible, because edges have two ends; "
            "make one of them even"
        )


def read_edges(file: str | Path | None, num_clients: int, *, untrained: Collection[int] = ()) -> list[tuple[int, int]]:
    """Return the edges of a file, "i j" per line, over the clients 0 to ``num_clients - 1``; ``#`` starts a comment.

    Those of ``untrained`` clients are left out, without which the other clients must be connected.
    """
    if file is None:
        raise InputError("strategy.topology=file needs strategy.file, a text file with an edge per line; name it")
    text = read_text(Path(file))
    if text is None:
        raise InputError(f"strategy.file={file} does not exist; name a text file with an edge per line, such as 0 1")
    edges: dict[tuple[int, int], int] = {}  # to line numbers
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):  # of Windows' editors
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            edge = _edge(words, num_clients)
            if edge in edges:
                raise InputError(f"the edge {edge[0]} {edge[1]} is there already, in line {edges[edge]}; remove one")
        except InputError as error:
            raise InputError(f"strategy.file={file}, line {number}: {error}") from None
        edges[edge] = number
    clients = [client for client in range(num_clients) if client not in untrained]
    kept = [edge for edge in edges if not any(client in untrained for client in edge)]
    setting = f"strategy.file={file}"
    if untrained:
        setting += f" without {_named(sorted(untrained))}, which never train{'s' * (len(untrained) == 1)},"
    _check_connected(kept, clients, setting)
    return kept


def _edge(words: list[str], num_clients: int) -> tuple[int, int]:
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        text = sanitize(" ".join(words))[:50]
        raise InputError(f"{text!r} is no edge; write the numbers of two clients, such as 0 1")
    one, other = sorted(map(int, words))
    if other >= num_clients:
        raise InputError(f"there is no client {other}; the {num_clients} clients are 0 to {num_clients - 1}")
    if one == other:
        raise InputError(f"client {one} is joined to itself; every client counts itself anyway, remove the line")
    return one, other


def _check_connected(edges: list[tuple[int, int]], clients: list[int], setting: str) -> None:
    import networkx as nx

    graph = nx.Graph(edges)
    alone = [client for client in clients if client not in graph]
    if alone and len(clients) > 1:
        raise InputError(f"{setting} has no edge for {_named(alone)}; every client needs a neighbor: add edges")
    pieces: list[list[int]] = sorted(sorted(piece) for piece in nx.connected_components(graph))
    if len(pieces) > 1:
        smallest = _named(min(pieces, key=len))
        raise InputError(
            f"{setting} has {len(pieces)} pieces with no edge between them, one of {smallest}; add edges that join them"
        )


def _named(clients: list[int]) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {shortened(clients, maximum=8)}"


def plot_topology(graph: "nx.Graph", file: Path) -> None:
    """Draw the graph of `make_graph` into a PNG file. Raises `InputError` if it cannot be written.

    Nodes are labeled with partition ids. The title contains the kind, the numbers of nodes and edges, and the second
    eigenvalue.
    """
    from matplotlib.collections import LineCollection

    positions = node_positions(graph)
    clients = [node for node in graph if node != SERVER]
    size = min(max(3.0 + 0.04 * len(clients), 5.0), 10.0)
    figure = new_figure(width=size, height=size)
    axes = figure.add_subplot()
    axes.set_title(describe(graph), fontsize=9)
    edges = [(positions[first], positions[second]) for first, second in graph.edges]
    axes.add_collection(
        LineCollection(edges, colors=_EDGE, linewidths=0.8, alpha=max(0.1, min(1.0, 400 / (len(edges) + 1))))
    )
    labeled = len(clients) <= _MAX_LABELED
    dot = 160 if len(clients) <= 30 else 80 if labeled else 12
    across, up = zip(*(positions[client] for client in clients), strict=True)
    axes.scatter(across, up, s=dot, color=_CLIENT, zorder=2)
    if SERVER in graph:
        axes.scatter(positions[SERVER][0], positions[SERVER][1], s=2 * dot, color=_SERVER, marker="s", zorder=2)
        axes.annotate(SERVER, positions[SERVER], xytext=(0, 15), textcoords="offset points", ha="center", fontsize=8)
    if labeled:
        for node in clients:
            axes.text(
                *positions[node], str(node), color="white", ha="center", va="center", fontsize=7 if dot > 100 else 5
            )
    axes.margins(0.08)
    axes.set_aspect("equal")
    axes.set_axis_off()
    write_png(figure, file)


def describe(graph: "nx.Graph") -> str:
    """Return the graph's kind, numbers of nodes and edges, and second eigenvalue in one line."""
    hub = SERVER in graph  # which computes the plain mean, so that all models are equal
    eigenvalue = 0.0 if hub else second_eigenvalue(weight_matrix(metropolis_weights(graph)))
    nodes = f"{len(graph) - hub} clients{' and the server' if hub else ''}"
    return f"{graph.graph['topology']}: {nodes}, {graph.number_of_edges()} edges, second eigenvalue {eigenvalue:.3f}"


def node_positions(graph: "nx.Graph") -> dict[int | str, Point]:
    """Return deterministic positions: rows of a grid, a circle around a hub, or a spring layout."""
    import networkx as nx

    topology, clients = graph.graph["topology"], [node for node in graph if node != SERVER]
    if topology == "grid":
        columns = grid_columns(len(clients))
        return {client: (place % columns, -(place // columns)) for place, client in enumerate(clients)}
    if topology in ("ring", "star", "complete"):
        turn = 2 * math.pi / len(clients)
        circle: dict[int | str, Point] = {
            client: (math.sin(turn * place), math.cos(turn * place)) for place, client in enumerate(clients)
        }
        return {**circle, SERVER: (0.0, 0.0)} if SERVER in graph else circle
    return {node: (float(x), float(y)) for node, (x, y) in nx.spring_layout(graph, seed=0).items()}
