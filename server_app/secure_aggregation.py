"""The server side of secure aggregation: the mean of clients' deltas by SecAgg+, and what it guarantees.

Messages go through the exchange of the run, with its deadline.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from flwr.app import Message, RecordDict

from fedssl.arrays import Layers
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.config.constraints import MIN_IMAGES
from fedssl.config.settings import Settings
from fedssl.errors import InputError
from fedssl.rules import Problem
from fedssl.secure_aggregation.graph import SharingGraph, choose_graph
from fedssl.secure_aggregation.masks import SEED_BITS
from fedssl.wire.secure_aggregation import (
    MAX_CLIENTS,
    MAX_WEIGHT,
    MIN_CLIENTS,
    UNIFORM_WEIGHT,
    summed_names,
    summed_size,
)
from server_app.messaging import ClientMessenger
from server_app.secagg_round import SecAggRound, SecureMean, TooFewParticipants
from strategies.rules import RunParts, needs_full_exchange, sum_problem
from strategies.types import Aggregator
from strategies.weighted_sum import WeightedSum


def graph_for(settings: SecureAggregationSettings, clients: int) -> SharingGraph:
    """Return the graph of neighbors for a number of clients; raises `InputError` if there is none."""
    return choose_graph(
        clients,
        corrupted_fraction=settings.corrupted_fraction,
        dropout_fraction=settings.dropout_fraction,
        security_bits=settings.security_bits,
        correctness_bits=settings.correctness_bits,
        neighbors=settings.neighbors,
        threshold=settings.threshold,
    )


def largest_weight(settings: SecureAggregationSettings, *, max_examples: int | None, images: int | None) -> int:
    """Return the largest number of images that a client may have as its weight.

    ``images`` are those of the largest client, None if clients are devices. Raises `InputError` if nothing limits them.
    """
    if settings.max_weight is not None and images is not None and settings.max_weight < images:
        raise InputError(
            f"secure_aggregation.max_weight={settings.max_weight} but the largest client has {images} images, which "
            f"are its weight; set it to {images} or more, or to null"
        )
    limits = [limit for limit in (settings.max_weight, max_examples) if limit is not None] or [images or 0]
    if limits == [0]:
        raise InputError(
            "secure_aggregation.max_weight=null but the weight of a device, its number of images, is masked; set "
            "secure_aggregation.max_weight to the number of images of the largest device, or strategy.weighting=uniform"
        )
    return min(max(min(limits), MIN_IMAGES), MAX_WEIGHT)


def weights_by_examples(aggregator: Aggregator) -> bool:
    """Return whether a sum weights clients by their numbers of images, which are then masked as well."""
    return isinstance(aggregator, WeightedSum) and aggregator.weighting == "examples"


def max_weight_of(settings: SecureAggregationSettings, aggregator: Aggregator) -> int:
    """Return the largest weight of a client in a round with this aggregator; `UNIFORM_WEIGHT`: all are equal."""
    if not weights_by_examples(aggregator):
        return UNIFORM_WEIGHT
    assert settings.max_weight is not None, "the settings of a run have the largest weight"
    return settings.max_weight


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
        "adversary": "honest-but-curious server",
    }


def describe_graph(settings: SecureAggregationSettings, graph: SharingGraph) -> str:
    """Return the line of the log about what secure aggregation guarantees."""
    values = privacy_parameters(settings, graph)
    return (
        f"secure aggregation of {graph.clients} clients: {graph.neighbors} neighbors, threshold {graph.threshold}, at "
        f"most {graph.max_dropouts} dropouts and {graph.corrupted} corrupted clients, {values['security_bits']:g} "
        f"security bits, {values['adversary']}, masks by {values['mask_generator']}"
    )


def secure_mean_delta(
    messenger: ClientMessenger,
    contents: Mapping[int, RecordDict],
    settings: SecureAggregationSettings,
    *,
    length: int,
    round: int,
    timeout: float,
    deadline: float | None,
    max_weight: int = UNIFORM_WEIGHT,
) -> SecureMean:
    """Run the four phases with the nodes of ``contents``, whose deltas have a length; raises `TooFewParticipants`.

    ``max_weight`` is as in `SecAggRound`.
    """
    if len(contents) < MIN_CLIENTS:
        raise TooFewParticipants(f"{len(contents)} clients are available, and secure aggregation needs {MIN_CLIENTS}")
    try:
        graph = graph_for(settings, len(contents))
    except InputError as reason:
        raise TooFewParticipants(str(reason)) from reason

    def send(messages: list[Message]) -> Iterator[tuple[Message, Message]]:
        return messenger.send_and_receive(messages, timeout=timeout, deadline=deadline)

    return SecAggRound(send, graph, settings, length=length, round=round, max_weight=max_weight).run(contents)


def apply_delta(layers: Layers, delta: np.ndarray) -> Layers:
    """Add a delta of `delta_of` to the layers, without counters.

    Raises `TooFewParticipants` if it has another length or is not finite.
    """
    names = summed_names(layers)
    if delta.ndim != 1 or len(delta) != summed_size(layers) or not np.isfinite(delta).all():
        raise TooFewParticipants("the sum of secure aggregation does not fit the model")
    applied, start = dict(layers), 0
    for name in names:
        array = layers[name]
        part = delta[start : start + array.size].reshape(array.shape)
        applied[name], start = (array + part).astype(array.dtype), start + array.size
    return applied


def single_updates_stay_secret(settings: Settings) -> Problem:
    """Refuse what needs single updates."""
    aggregation = settings.aggregation
    of_updates = settings.privacy or aggregation.buffered or aggregation.max_norm_ratio is not None
    if not (settings.secure_aggregation and of_updates):
        return None
    return (
        "secure_aggregation=secagg_plus reveals only the sum of updates; set privacy=none "
        "aggregation.buffered=false aggregation.max_norm_ratio=null, which need single updates"
    )


def graph_protects_updates(settings: Settings) -> Problem:
    """Require a graph of neighbors that protects the updates of this number of clients."""
    secure, clients = settings.secure_aggregation, settings.clients_per_round + settings.aggregation.over_selection
    if secure is None:
        return None
    if clients > MAX_CLIENTS:
        return (
            f"secure aggregation of {clients} clients is not possible: the sum of more than {MAX_CLIENTS} quantized "
            "updates exceeds 2^32; lower clients_per_round"
        )
    if SEED_BITS[secure.mask_generator] < secure.security_bits:
        return (
            f"secure_aggregation.mask_generator={secure.mask_generator} has {SEED_BITS[secure.mask_generator]} "
            f"security bits, but secure_aggregation.security_bits={secure.security_bits:g}; lower it, or set "
            "secure_aggregation.mask_generator=chacha20"
        )
    if clients < MIN_CLIENTS:  # refused by the round
        return None
    if secure.neighbors is not None and secure.neighbors >= clients:
        return (
            f"secure_aggregation.neighbors={secure.neighbors} but {clients} clients per round have {clients - 1} "
            "others each; lower it, or set it to null"
        )
    try:
        graph_for(secure, clients)
    except InputError as problem:
        return str(problem)
    return None


def snapshots_have_no_models(settings: Settings) -> Problem:
    """Refuse snapshots, which have the models of single clients."""
    if not (settings.secure_aggregation and settings.recording.snapshot_every):
        return None
    return "secure_aggregation=secagg_plus reveals no client's model; set snapshot_every=0"


def updates_are_summed(parts: RunParts) -> Problem:
    """Require a strategy and a method whose updates are summed."""
    if not parts.settings.secure_aggregation:
        return None
    return sum_problem("secure_aggregation=secagg_plus", parts, weightings=("uniform", "examples"))


SETTINGS_RULES = (single_updates_stay_secret, graph_protects_updates, snapshots_have_no_models)
RUN_RULES = (updates_are_summed,)
ROUND_RULES = (needs_full_exchange("secure_aggregation=secagg_plus"),)
