"""Client side of secure aggregation: checks of the server's proposal, and the masked update of a training.

The client validates the server's parameters, because masks protect nothing if one node controls them.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedssl.errors import RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.secure_aggregation.client_phases import SecAggState, collect, setup, share_keys, unmask
from fedssl.secure_aggregation.graph import SharingGraph, removed_clients
from fedssl.secure_aggregation.masks import MASK_GENERATORS, SEED_BITS
from fedssl.secure_aggregation.protocol import (
    COLLECT,
    MASK_GENERATOR,
    MAX_CLIENTS,
    MAX_WEIGHT,
    MIN_CLIENTS,
    PHASES,
    SECAGG_CONFIG_KEY,
    SECAGG_PARAMETERS,
    SETUP,
    SHARE_KEYS,
    UNIFORM_WEIGHT,
    delta_of,
)
from fedssl.wire.messages import ClientUpdate, TrainPlan

log = logging.getLogger("fedssl")

STATE = "secaggplus_state"  # name of the record that a client stores between the phases


def is_secure(message: Message) -> bool:
    """Return whether a message belongs to the protocol."""
    return SECAGG_CONFIG_KEY in message.content.config_records


def secagg_reply(
    message: Message,
    context: Context,
    train: Callable[[Message, Context], tuple[TrainPlan, ClientUpdate]],
    limits: Limits | None = None,
) -> Message:
    """Return the reply to one phase of the protocol. ``train`` is called in the collect phase.

    Raises `RequestRefused` if the server's parameters would reveal more than a sum, or are below an edge client's
    ``limits``; simulated clients have none.
    """
    values = dict(message.content.config_records[SECAGG_CONFIG_KEY])
    phase = values.pop("stage", None)
    if phase == SETUP:
        _check_setup(values)
        if limits is not None:
            _check_limits(values, limits)
        state, reply = setup(values, node=message.metadata.dst_node_id)
    else:
        state = SecAggState.read(context.state.config_records.get(STATE))
        expected = PHASES[(PHASES.index(state.phase) + 1) % len(PHASES)]
        if phase != expected:
            raise RequestRefused(f"the phase {phase!r} of secure aggregation does not follow {state.phase!r}")
        if phase == SHARE_KEYS:
            reply = share_keys(state, values)
        elif phase == COLLECT:
            reply = collect(state, values, lambda: _weighted_delta(message, context, train, state))
        else:
            reply = unmask(state, values)
    state.phase = phase
    context.state.config_records[STATE] = state.to_record()
    return Message(RecordDict({SECAGG_CONFIG_KEY: ConfigRecord(reply)}), reply_to=message)


def _weighted_delta(
    message: Message,
    context: Context,
    train: Callable[[Message, Context], tuple[TrainPlan, ClientUpdate]],
    state: SecAggState,
) -> tuple[np.ndarray, int]:
    """Return the change of the layers in a training, and the weight of the client."""
    plan, update = train(message, context)
    delta = delta_of(update.layers, plan.layers)
    _check_delta(delta, max_abs=state.clipping_range)
    if state.max_weight == UNIFORM_WEIGHT:
        return delta, UNIFORM_WEIGHT
    images = update.num_examples or 0
    if not 0 < images <= state.max_weight:  # a larger weight would count more than its masked sum can hold
        found = "more images" if images else "no images"
        raise RequestRefused(
            f"this client has {found}, but secure_aggregation.max_weight={state.max_weight:g} is the largest weight; "
            "raise it to the number of images of the largest client"
        )
    return delta, images


def _check_delta(delta: np.ndarray, *, max_abs: float) -> None:
    """Refuse non-finite values, which would invalidate the sum, and log clipped values."""
    if not np.isfinite(delta).all():
        raise RequestRefused("training diverged: the update has values that are not finite; lower optimizer.lr")
    clipped = int(np.count_nonzero(np.abs(delta) > max_abs))
    if clipped:
        log.warning(
            "%d values of the update exceed secure_aggregation.clipping_range=%g and are clipped to it",
            clipped,
            max_abs,
        )


def _check_setup(values: Mapping[str, Any]) -> None:
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


def _check_limits(values: Mapping[str, Any], limits: Limits) -> None:
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
