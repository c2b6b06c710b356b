"""The policy of the settings. Buffered aggregation applies late updates to the current model with smaller weights.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (FedBuff), AISTATS 2022.
"""

import math
from dataclasses import replace

from flwr.app import Message

from fedssl.arrays import Layers, is_weight
from fedssl.config.aggregation_settings import AggregationSettings
from fedssl.wire.messages import TrainPlan
from fedssl.wire.records import content_bytes
from server_app.policies import LoopPolicy
from server_app.updates import UpdateReader, ValidUpdate
from strategies.round_start import ClientAssignment
from strategies.types import GLOBAL


def make_policy(settings: AggregationSettings) -> LoopPolicy:
    """Return the policy of the settings."""
    return LoopPolicy(
        extra=settings.over_selection,
        deadline=settings.round_deadline,
        min_replies=settings.min_updates if settings.buffered else None,
        min_updates=settings.min_updates,
        max_retries=settings.max_retries,
        rebase=rebase if settings.buffered else None,
    )


def rebase(reader: UpdateReader, client: int, *, plan: Message, reply: Message) -> ValidUpdate:
    """Return the update of a reply to an earlier plan, applied to the current model; raises `InvalidUpdate`."""
    current, number = reader.starts[GLOBAL].expected_upload, int(plan.metadata.group_id)
    start_layers = TrainPlan.from_content(plan.content).layers
    start = current.with_layers({name: start_layers[name] for name in current.layers})
    slot = ClientAssignment(client, (GLOBAL,), GLOBAL, tuple(start_layers), content_bytes(plan.content), (GLOBAL,))
    valid = reader.validate(slot, reply, start, number=number)
    staleness = reader.number - number
    layers = apply_stale_update(valid.update.layers, start=start.layers, current=current.layers, staleness=staleness)
    update = replace(valid.update, layers=layers)
    return replace(valid, update=update, cosines=current.cosines_of(layers), staleness=staleness)


def apply_stale_update(layers: Layers, *, start: Layers, current: Layers, staleness: int) -> Layers:
    """Apply an update of ``staleness`` rounds ago to the current model.

    ``current + (layers - start) / sqrt(1 + staleness)`` (Section 5.1, s(tau) = (1 + tau)^-0.5). The mean over clients
    is then FedBuff's server update (Algorithm 1) with a server learning rate of 1. Running statistics, which FedBuff
    does not cover, move towards the client's: ``current + (layers - current) / sqrt(1 + staleness)``, because a
    difference can make a variance negative. Integer counters are returned unchanged.
    """
    weight = 1 / math.sqrt(1 + staleness)
    updated: Layers = {}
    for name, array in layers.items():
        origin = start[name] if is_weight(name, array) else current[name]
        updated[name] = array
        if array.dtype.kind == "f":
            updated[name] = current[name] + (array - origin) * array.dtype.type(weight)
    return updated
