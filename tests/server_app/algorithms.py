"""Small algorithms with several models, as somebody else might write them in a package of their own."""

from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.fedavg import make_weighted_mean
from strategies.weighted_sum import WeightedSum


class Groups(ServerStrategy):
    """A model for the clients with even partition ids, and one for the others."""

    def starting_model(self, state, round, client):
        return ("even", "odd")[client % 2]


class TwoGroups(FedSSLStrategy):
    """Federated averaging within each of two groups of clients."""

    def __init__(self):
        super().__init__(Groups(make_weighted_mean("examples")))


class Neighbours(ServerStrategy):
    """A model for every client of a ring, into which its own update goes and those of the clients beside it."""

    def __init__(self, *, clients):
        super().__init__(WeightedSum)
        self._clients = clients

    def starting_model(self, state, round, client):
        return str(client)

    def destination_models(self, state, round, client, start):
        return tuple(str((client + step) % self._clients) for step in (-1, 0, 1))


class Ring(FedSSLStrategy):
    """Gossip: after a round, every client of a ring has the mean of its own model and its two neighbours'."""

    def __init__(self, *, clients):
        super().__init__(Neighbours(clients=clients))
