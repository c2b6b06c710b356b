"""Checks of the parameters that a server proposes for secure aggregation, on a client.

Masks protect nothing if one node controls the parameters of all clients.
"""

import math
from collections.abc import Mapping
from typing import Any

from fedssl.errors import RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.secure_aggregation.graph import SharingGraph, removed_clients
from fedssl.secure_aggregation.masks import MASK_GENERATORS, SEED_BITS
from fedssl.secure_aggregation.protocol import (
    MASK_GENERATOR,
    MAX_CLIENTS,
    MAX_WEIGHT,
    MIN_CLIENTS,
    SECAGG_PARAMETERS,
    UNIFORM_WEIGHT,
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
