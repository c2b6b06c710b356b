"""Updates that answer the plan of an earlier round (buffered aggregation, Nguyen et al., AISTATS 2022, "FedBuff")."""

import math

from fedssl.arrays import Layers


def brought_up(layers: Layers, *, begun: Layers, now: Layers, age: int) -> Layers:
    """What an update of ``age`` rounds ago is for the present model: the way that it went, shorter, from there.

    ``now + (layers - begun) / sqrt(1 + age)`` with the weight for staleness of FedBuff (Section 5.1, s(tau) =
    (1 + tau)^-0.5); the mean over clients is then its update of the server (Algorithm 1) with a server learning rate of
    1. Counters, which are no floating-point numbers, stay as they came.
    """
    weight = 1 / math.sqrt(1 + age)
    return {
        name: now[name] + (array - begun[name]) * array.dtype.type(weight) if array.dtype.kind == "f" else array
        for name, array in layers.items()
    }
