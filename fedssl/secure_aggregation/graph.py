r"""Graph of neighbors of SecAgg+ (Bell et al., CCS 2020, sections 3 and 4), its bounds, and what a client accepts.

The clients are the nodes of a Harary graph in random order: a circle in which each is a neighbor of the k / 2 nodes
before and after it. Every client shares its secrets with its k neighbors and itself, and t shares reveal a secret.
With C corrupted clients and D dropouts among n, chosen independently of the graph, the sum is private unless

1. an honest client has t corrupted neighbors. Their number is hypergeometric: P[X >= t], X ~ H(n - 1, C, k);
2. the honest survivors are not connected, which takes k / 2 successive removed nodes at two places of the circle. There
   are n (n - k - 1) / 2 pairs of such places, and all k nodes are removed with probability
   binom(n - k, C + D - k) / binom(n, C + D);
3. fewer than two honest clients survive: the corrupted ones subtract their updates from the sum.

It is correct unless a client has fewer than t surviving neighbors: P[Y < t], Y ~ H(n - 1, n - D, k) for a client that
dropped out. Both are bounded by a sum over clients. The server is honest but curious: it follows the protocol, and
knows what the corrupted clients know.

Flower's protocol does not prove to clients which others survived. Therefore t is more than half of the shares, so that
a server cannot collect both secrets of a client from disjoint halves of its neighbors.

$$
n P(X \ge t) + \frac{n (n - k - 1)}{2} \binom{n - k}{C + D - k} \Big/ \binom{n}{C + D} \le 2^{-\sigma} \qquad
n P(Y < t) \le 2^{-\eta}
$$

with n clients, C corrupted and D dropouts among them, k neighbors, the threshold t, X the corrupted neighbors of a
client, Y the surviving neighbors of a dropout (both hypergeometric), and $\sigma$, $\eta$ the bits of security and of
correctness.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.secure_aggregation.masks import MASK_GENERATORS, SEED_BITS
from fedssl.secure_aggregation.protocol import (
    MASK_GENERATOR,
    MAX_CLIENTS,
    MAX_WEIGHT,
    MIN_CLIENTS,
    SECAGG_PARAMETERS,
    UNIFORM_WEIGHT,
)

ADVERSARY = "honest-but-curious server"
MIN_HONEST_SURVIVORS = 2  # the sum over one honest client is its update


@dataclass(frozen=True, kw_only=True)
class SharingGraph:
    """Graph of ``clients`` with an even number of ``neighbors``, or of all others, and what it must tolerate."""

    clients: int
    neighbors: int
    threshold: int  # number of shares that reveal a secret
    corrupted: int
    dropouts: int

    @property
    def shares(self) -> int:
        return self.neighbors + 1

    @property
    def is_complete(self) -> bool:
        return self.neighbors == self.clients - 1

    @property
    def max_dropouts(self) -> int:
        """Return the number of dropouts up to which a round succeeds. Only a complete graph can tolerate more."""
        return self.clients - self.threshold if self.is_complete else self.dropouts

    @property
    def honest_survivors(self) -> int:
        """Return the smallest number of honest clients in the sum of a round that succeeds."""
        return self.clients - self.corrupted - self.max_dropouts

    @property
    def disconnection(self) -> float:
        """Return the bound on the probability that the honest survivors are not connected."""
        removed = self.corrupted + self.dropouts
        return 0.0 if self.is_complete else _disconnection(self.clients, self.neighbors, removed)

    @property
    def security_bits(self) -> float:
        """Return -log2 of the bound on the probability that the sum is not private."""
        if 2 * self.threshold <= self.shares or self.honest_survivors < MIN_HONEST_SURVIVORS:
            return 0.0
        if self.is_complete:
            return math.inf if self.threshold > self.corrupted else 0.0
        corrupted_neighbors = _hypergeometric(self.clients - 1, self.corrupted, self.neighbors)
        failure = self.clients * corrupted_neighbors[self.threshold :].sum() + self.disconnection
        return _bits(float(failure))

    @property
    def correctness_bits(self) -> float:
        """Return -log2 of the bound on the probability that a secret cannot be recovered."""
        if self.is_complete:
            return math.inf if self.threshold <= self.clients - self.dropouts else 0.0
        survivors = min(self.clients - self.dropouts, self.clients - 1)
        surviving_neighbors = _hypergeometric(self.clients - 1, survivors, self.neighbors)
        return _bits(self.clients * float(surviving_neighbors[: self.threshold].sum()))

    def with_threshold(self, security_bits: float) -> "SharingGraph":
        """Return the graph with its smallest threshold for the security, or with the largest one, that is too small."""
        graphs = [
            replace(self, threshold=threshold) for threshold in range(max(2, self.shares // 2 + 1), self.shares + 1)
        ]
        return graphs[min(bisect_left(graphs, security_bits, key=lambda graph: graph.security_bits), len(graphs) - 1)]


def satisfies(graph: SharingGraph, settings: SecureAggregationSettings) -> bool:
    """Return whether a graph has the bits of security and of correctness that the settings require."""
    return graph.security_bits >= settings.security_bits and graph.correctness_bits >= settings.correctness_bits


def smallest_graph(settings: SecureAggregationSettings, clients: int, *, corrupted: int, dropouts: int) -> SharingGraph:
    """Return the graph with the fewest neighbors that satisfies both bounds, or else the complete graph."""
    for neighbors in [*range(2, clients - 1, 2), clients - 1]:
        graph = SharingGraph(clients=clients, neighbors=neighbors, threshold=0, corrupted=corrupted, dropouts=dropouts)
        if graph.is_complete or _bits(graph.disconnection) >= settings.security_bits:
            graph = graph.with_threshold(settings.security_bits)
            if graph.is_complete or satisfies(graph, settings):
                break
    return graph


def removed_clients(fraction: float, clients: int) -> int:
    """Return a fraction of the clients, rounded up."""
    return math.ceil(fraction * clients - 1e-9)


@lru_cache
def graph_for(settings: SecureAggregationSettings, clients: int) -> SharingGraph:
    """Return the graph for a number of clients, with the neighbors and the threshold of the settings, if any.

    Raises `InputError` if it does not satisfy the bounds.
    """
    neighbors, threshold = settings.neighbors, settings.threshold
    corrupted, dropouts = (
        removed_clients(fraction, clients) for fraction in (settings.corrupted_fraction, settings.dropout_fraction)
    )
    graph = smallest = smallest_graph(settings, clients, corrupted=corrupted, dropouts=dropouts)
    if not satisfies(smallest, settings):
        dropout, corruption = "secure_aggregation.dropout_fraction=0", "secure_aggregation.corrupted_fraction=0"
        remedies = {dropout: (corrupted, 0), corruption: (0, dropouts), f"{dropout} {corruption}": (0, 0)}
        remedy = next(
            remedy
            for remedy, (corrupted, dropouts) in remedies.items()
            if satisfies(smallest_graph(settings, clients, corrupted=corrupted, dropouts=dropouts), settings)
        )
        raise InputError(
            f"{_given(smallest)} is not possible with any number of neighbors; set {remedy}, or take more clients per "
            "round and smaller fractions"
        )
    if neighbors is not None:
        graph = replace(graph, neighbors=_possible(neighbors, clients)).with_threshold(settings.security_bits)
    if threshold is not None:
        graph = replace(graph, threshold=threshold)
    if graph.threshold > graph.shares:
        raise InputError(
            f"secure_aggregation.threshold={threshold} but a client has {graph.shares} shares, of its neighbors and of "
            f"itself; lower it to {smallest.threshold}, or set it to null"
        )
    if not satisfies(graph, settings):
        raise InputError(
            f"{_given(graph)} with neighbors={graph.neighbors} and threshold={graph.threshold} has "
            f"{graph.security_bits:.3g} security bits and {graph.correctness_bits:.3g} correctness bits, but "
            f"{settings.security_bits:g} and {settings.correctness_bits:g} are needed; set "
            f"secure_aggregation.neighbors={smallest.neighbors} and secure_aggregation.threshold={smallest.threshold}, "
            "or both to null"
        )
    return graph


def _possible(neighbors: int, clients: int) -> int:
    """Return a number of neighbors, at most all others; raises `InputError` if a circle has no such neighborhood."""
    neighbors = min(neighbors, clients - 1)
    if neighbors % 2 and neighbors != clients - 1:
        raise InputError(
            f"secure_aggregation.neighbors={neighbors} but {clients} clients on a circle have an even number of "
            f"neighbors, or all {clients - 1}; set it to {neighbors + 1}"
        )
    return neighbors


def _given(graph: SharingGraph) -> str:
    return (
        f"secure aggregation of {graph.clients} clients, of which {graph.corrupted} may be corrupted, "
        f"{graph.dropouts} may drop out and {MIN_HONEST_SURVIVORS} honest ones must remain,"
    )


def random_neighbors(nodes: Sequence[int], neighbors: int) -> dict[int, set[int]]:
    """Return the neighbors of every node on a circle in random order, and the node itself.

    The order comes from the system's generator of random numbers, which no seed of a run makes predictable.
    """
    circle = list(nodes)
    random.SystemRandom().shuffle(circle)
    if neighbors >= len(circle) - 1:
        return {node: set(circle) for node in circle}
    half = neighbors // 2
    return {
        node: {circle[(position + offset) % len(circle)] for offset in range(-half, half + 1)}
        for position, node in enumerate(circle)
    }


@lru_cache(maxsize=8)
def _hypergeometric(population: int, successes: int, draws: int) -> np.ndarray:
    """Return the probabilities of 0 to ``draws`` successes in draws without replacement, ``(draws + 1,)``."""
    total = _log_binomial(population, draws)
    return np.array(
        [
            math.exp(_log_binomial(successes, count) + _log_binomial(population - successes, draws - count) - total)
            for count in range(draws + 1)
        ]
    )


@lru_cache(maxsize=8)
def _disconnection(clients: int, neighbors: int, removed: int) -> float:
    if removed < neighbors:
        return 0.0
    pairs = clients * (clients - neighbors - 1) / 2
    chance = _log_binomial(clients - neighbors, removed - neighbors) - _log_binomial(clients, removed)
    return min(pairs * math.exp(min(chance, 0.0)), 1.0)


def _log_binomial(n: int, k: int) -> float:
    if not 0 <= k <= n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _bits(probability: float) -> float:
    return math.inf if probability <= 0 else max(-math.log2(probability), 0.0)


def privacy_parameters(
    settings: SecureAggregationSettings, graph: SharingGraph, *, max_weight: int = UNIFORM_WEIGHT
) -> dict[str, float | str]:
    """Return what secure aggregation guarantees, for ``metrics.jsonl`` and ``summary.json``."""
    weights: dict[str, float | str] = {} if max_weight == UNIFORM_WEIGHT else {"max_weight": max_weight}
    return weights | {
        "clients": graph.clients,
        "neighbors": graph.neighbors,
        "threshold": graph.threshold,
        "max_dropouts": graph.max_dropouts,
        "max_corrupted": graph.corrupted,
        "security_bits": settings.security_bits,
        "correctness_bits": settings.correctness_bits,
        "mask_generator": settings.mask_generator,
        "adversary": ADVERSARY,
    }


def describe_graph(settings: SecureAggregationSettings, graph: SharingGraph) -> str:
    """Return the line of the log about what secure aggregation guarantees."""
    return (
        f"secure aggregation of {graph.clients} clients: {graph.neighbors} neighbors, threshold {graph.threshold}, at "
        f"most {graph.max_dropouts} dropouts and {graph.corrupted} corrupted clients, {settings.security_bits:g} "
        f"security bits, {ADVERSARY}, masks by {settings.mask_generator}"
    )


def check_setup(values: Mapping[str, Any]) -> None:
    """Refuse parameters that protect nobody; raises `RequestRefused`."""
    numbers = [number for key in ("sample_num", "share_num", "threshold") if type(number := values.get(key)) is int]
    if len(numbers) < 3:
        raise RequestRefused("secure aggregation was proposed without the number of clients")
    clients, shares, threshold = numbers
    if not MIN_CLIENTS <= shares <= clients <= MAX_CLIENTS or not shares < 2 * threshold <= 2 * shares:
        raise RequestRefused(
            f"secure aggregation of {clients} clients with {shares} shares, {threshold} of which reveal a mask, "
            f"was proposed; at least {MIN_CLIENTS} clients, no more than {MAX_CLIENTS}, and more than half of the "
            "shares are needed"
        )
    for key, expected in SECAGG_PARAMETERS.items():
        if values.get(key) != expected:
            raise RequestRefused(
                f"secure aggregation was proposed with {key}={values.get(key)!r} instead of {expected}"
            )
    max_weight = values.get("max_weight")
    if not isinstance(max_weight, float) or not (max_weight == UNIFORM_WEIGHT or 2 <= max_weight <= MAX_WEIGHT):
        raise RequestRefused(
            f"secure aggregation was proposed with max_weight={max_weight!r}; it is 1.0 for equal weights, or a number "
            f"of images from 2 to {MAX_WEIGHT}"
        )
    clipping_range, generator = values.get("clipping_range"), values.get(MASK_GENERATOR, "mt19937")
    if not isinstance(clipping_range, float) or not 0 < clipping_range < math.inf:
        raise RequestRefused(f"secure aggregation was proposed with clipping_range={clipping_range!r}")
    if generator not in MASK_GENERATORS:
        raise RequestRefused(
            f"secure aggregation was proposed with {MASK_GENERATOR}={generator!r}; known are "
            f"{', '.join(MASK_GENERATORS)}"
        )


def proposed_parameters(settings: SecureAggregationSettings, graph: SharingGraph) -> dict[str, Any]:
    """Return the parameters that the server proposes, apart from the largest weight."""
    return {
        "sample_num": graph.clients,
        "share_num": graph.shares,
        "threshold": graph.threshold,
        "clipping_range": float(settings.clipping_range),
        MASK_GENERATOR: settings.mask_generator,
        **SECAGG_PARAMETERS,
    }


def check_limits(values: Mapping[str, Any], limits: Limits) -> None:
    """Refuse parameters that protect less than an edge client requires; raises `RequestRefused`."""
    clients, shares, threshold = values["sample_num"], values["share_num"], values["threshold"]
    generator = values.get(MASK_GENERATOR, "mt19937")
    corrupted, dropouts = (
        removed_clients(fraction, clients) for fraction in (limits.corrupted_fraction, limits.dropout_fraction)
    )
    graph = SharingGraph(
        clients=clients, neighbors=shares - 1, threshold=threshold, corrupted=corrupted, dropouts=dropouts
    )
    required = f"but this device requires {limits.security_bits:g} (security_bits of its limits)"
    if SEED_BITS[generator] < limits.security_bits:
        raise RequestRefused(
            f"the masks of secure_aggregation.mask_generator={generator} have {SEED_BITS[generator]} security bits, "
            f"{required}; set secure_aggregation.mask_generator=chacha20"
        )
    if graph.security_bits < limits.security_bits:
        raise RequestRefused(
            f"secure aggregation of {clients} clients with {shares - 1} neighbors and a threshold of {threshold} has "
            f"{graph.security_bits:.3g} security bits if {corrupted} clients are corrupted and {dropouts} drop out, "
            f"{required}; set secure_aggregation.corrupted_fraction to {limits.corrupted_fraction:g}, dropout_fraction "
            f"to {limits.dropout_fraction:g} and security_bits to {limits.security_bits:g} or more, and neighbors and "
            "threshold to null"
        )
