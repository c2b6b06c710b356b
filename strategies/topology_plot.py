"""Plot of a topology."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.plots.style import new_figure, write_png
from strategies.topology import SERVER, grid_columns, mixing_weights, second_eigenvalue, weight_matrix

if TYPE_CHECKING:
    import networkx as nx

# Two colors of Okabe and Ito, safe for color blindness. The server also has another shape.
_CLIENT, _SERVER, _EDGE = "#0072B2", "#E69F00", "0.6"
_MAX_LABELED = 100  # clients; more labels would not be legible
MAX_CLIENTS = 1000  # of a plot: layout and eigenvalues need the square of their number in memory and more in time

Point = tuple[float, float]


def plot_topology(graph: "nx.Graph", file: Path) -> None:
    """Draw the graph of `strategies.topology.make_graph` into a PNG file. Raises `InputError` if it cannot be written.

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
    eigenvalue = second_eigenvalue(weight_matrix(mixing_weights(graph)))
    hub = SERVER in graph
    nodes = f"{len(graph) - hub} clients{' and the server' if hub else ''}"
    return f"{graph.graph['topology']}: {nodes}, {graph.number_of_edges()} edges, second eigenvalue {eigenvalue:.3f}"


def node_positions(graph: "nx.Graph") -> dict[int | str, Point]:
    """Return deterministic positions: rows of a grid, a circle around a hub, or a spring layout."""
    import networkx as nx

    topology, clients = graph.graph["topology"], [node for node in graph if node != SERVER]
    if topology == "grid":
        columns = grid_columns(len(clients))
        return {client: (client % columns, -(client // columns)) for client in clients}
    if topology in ("ring", "star", "complete"):
        turn = 2 * math.pi / len(clients)
        circle: dict[int | str, Point] = {c: (math.sin(turn * c), math.cos(turn * c)) for c in clients}
        return {**circle, SERVER: (0.0, 0.0)} if SERVER in graph else circle
    return {node: (float(x), float(y)) for node, (x, y) in nx.spring_layout(graph, seed=0).items()}
