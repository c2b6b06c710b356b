"""Updates that answer the plan of an earlier round (buffered aggregation, Nguyen et al., AISTATS 2022, "FedBuff")."""

import math

from fedssl.arrays import Layers


def apply_stale_update(layers: Layers, *, start: Layers, current: Layers, staleness: int) -> Layers:
    """What an update of ``staleness`` rounds ago is for the present model: the way that it went, shorter, from there.

    ``current + (layers - start) / sqrt(1 + staleness)`` with the weight for staleness of FedBuff (Section 5.1, s(tau) =
    (1 + tau)^-0.5); the mean over clients is then its update of the server (Algorithm 1) with a server learning rate of
    1. Counters, which are no floating-point numbers, stay as they came.
    """
    weight = 1 / math.sqrt(1 + staleness)
    return {
        name: current[name] + (array - start[name]) * array.dtype.type(weight) if array.dtype.kind == "f" else array
        for name, array in layers.items()
    }
