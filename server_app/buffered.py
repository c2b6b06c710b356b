"""The policy of the settings. Buffered aggregation applies late updates to the current model with smaller weights.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (FedBuff), AISTATS 2022.
"""

import math

from fedssl.arrays import Layers, is_weight
from fedssl.config.aggregation_settings import AggregationSettings
from server_app.policies import LoopPolicy


def make_policy(settings: AggregationSettings) -> LoopPolicy:
    """Return the policy of the settings."""
    return LoopPolicy(
        extra=settings.over_selection,
        deadline=settings.round_deadline,
        min_replies=settings.min_updates if settings.buffered else None,
        min_updates=settings.min_updates,
        max_retries=settings.max_retries,
        rebase=apply_stale_update if settings.buffered else None,
    )


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
