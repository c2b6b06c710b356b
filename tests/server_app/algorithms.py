"""Small algorithms with several models, as somebody else might write them in a package of their own."""

from functools import partial

from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.eua import EUAAggregator, EUAServer
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


class UnifiedGroups(Groups, EUAServer):
    """EUA's server, once for each group."""


class TwoUnifiedGroups(FedSSLStrategy):
    """EUA within each of two groups of clients."""

    def __init__(self):
        super().__init__(UnifiedGroups(partial(EUAAggregator)))


class Switching(Groups):
    """As `Groups`, but in round 6 client 1 goes over to the even ones."""

    def starting_model(self, state, round, client):
        return "even" if (round, client) == (6, 1) else super().starting_model(state, round, client)


class TwoGroupsOneSwitch(FedSSLStrategy):
    """As `TwoGroups` with a client that changes its model."""

    def __init__(self):
        super().__init__(Switching(make_weighted_mean("examples")))
