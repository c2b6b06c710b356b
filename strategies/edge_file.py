"""A topology in a text file: an edge "i j" per line, two numbers of clients; what follows a ``#`` is a comment."""

from pathlib import Path

from fedssl.errors import InputError
from fedssl.untrusted import read_text, sanitize

_LISTED = 8  # clients that an error names


def read_edges(file: str | Path | None, num_clients: int) -> list[tuple[int, int]]:
    """The edges of a file, which join the clients 0 to ``num_clients - 1``.

    Raises
    ------
    InputError
        There is no file, a line is no edge, names a client that is not there, joins one to itself or says an edge
        again, or there is no way from one client to another.
    """
    if file is None:
        raise InputError("strategy.topology=file needs strategy.file, a text file with an edge per line; name it")
    text = read_text(Path(file))
    if text is None:
        raise InputError(f"strategy.file={file} is not there; name a text file with an edge per line, such as 0 1")
    edges: dict[tuple[int, int], int] = {}  # with the line of each
    for number, line in enumerate(text.splitlines(), start=1):
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
    _check_connected(list(edges), num_clients, f"strategy.file={file}")
    return list(edges)


def _edge(words: list[str], num_clients: int) -> tuple[int, int]:
    """An edge, the smaller number first."""
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        found = sanitize(" ".join(words))[:50]
        raise InputError(f"{found!r} is no edge; write the numbers of two clients, such as 0 1")
    one, other = sorted(map(int, words))
    if other >= num_clients:
        raise InputError(f"there is no client {other}; the {num_clients} clients are 0 to {num_clients - 1}")
    if one == other:
        raise InputError(f"client {one} is joined to itself; every client counts itself anyway, remove the line")
    return one, other


def _check_connected(edges: list[tuple[int, int]], num_clients: int, said: str) -> None:
    import networkx as nx

    graph = nx.Graph(edges)
    alone = [client for client in range(num_clients) if client not in graph]
    if alone and num_clients > 1:
        raise InputError(f"{said} has no edge for {_named(alone)}; every client needs a neighbour")
    pieces: list[list[int]] = sorted(sorted(piece) for piece in nx.connected_components(graph))
    if len(pieces) > 1:
        smallest = _named(min(pieces, key=len))
        raise InputError(
            f"{said} has {len(pieces)} pieces with no edge between them, one of {smallest}; add edges that join them"
        )


def _named(clients: list[int]) -> str:
    """Some clients in words."""
    listed = ", ".join(map(str, clients[:_LISTED]))
    more = f" and {len(clients) - _LISTED} more" if len(clients) > _LISTED else ""
    return f"client{'s' if len(clients) > 1 else ''} {listed}{more}"
