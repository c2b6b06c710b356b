"""Aggregation of a list of updates, as the pure functions of the strategies do it."""

from collections.abc import Sequence

from fedssl.arrays import NO_COSINES, Cosines, GlobalLayers, Layers
from fedssl.errors import InputError
from fedssl.wire.messages import ClientUpdate
from strategies.types import Aggregator, Mergeable
from strategies.weighted_sum import WeightedSum


def aggregate(
    global_layers: Layers | GlobalLayers,
    updates: Sequence[ClientUpdate],
    aggregator: Aggregator,
    *,
    needs_cosines: bool = True,
) -> Layers:
    """Return the new layers of one round with these updates, which are validated, in order of partition id."""
    reference = as_reference(global_layers)
    updates = validated(reference, updates)
    all_cosines = [NO_COSINES] * len(updates)
    if needs_cosines:
        all_cosines = reference.cosines_of_all([update.layers for update in updates])
    for update, cosines in zip(updates, all_cosines, strict=True):
        if not cosines.finite:
            raise InputError(f"client {update.partition_id}: layer {cosines.first_invalid} has NaN or infinite values")
    return aggregate_valid(reference, updates, all_cosines, aggregator)


def aggregate_valid(
    reference: GlobalLayers, updates: Sequence[ClientUpdate], all_cosines: Sequence[Cosines], aggregator: Aggregator
) -> Layers:
    """Return the new layers, given valid updates in order of partition id and their cosines with the global layers."""
    if isinstance(aggregator, Mergeable):
        aggregator.set_clients([update.partition_id for update in updates])
    aggregator.start(reference)
    if type(aggregator) is WeightedSum:  # a subclass may do more with each update
        aggregator.add_all(updates, all_cosines)
    else:
        for update, cosines in zip(updates, all_cosines, strict=True):
            aggregator.add(update, cosines)
    return aggregator.finish()


def as_reference(layers: Layers | GlobalLayers) -> GlobalLayers:
    """Return global layers as a reference, without products unless they are one."""
    return layers if isinstance(layers, GlobalLayers) else GlobalLayers(layers)


def validated(global_layers: GlobalLayers, updates: Sequence[ClientUpdate]) -> list[ClientUpdate]:
    """Return the updates in order of partition id if they fit the global layers, else raise `InputError`."""
    if not updates:
        raise InputError("no client sent an update; at least one is needed")
    for update in updates:
        try:
            global_layers.check(update.layers)
        except InputError as problem:
            raise InputError(f"client {update.partition_id}: {problem}") from problem
    return sorted(updates, key=lambda update: update.partition_id)
