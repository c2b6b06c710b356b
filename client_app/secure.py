"""Client side of secure aggregation, by Flower's SecAgg+ mod, which masks the update.

Flower's mod uses its older interface and expects a `FitRes`. The client also validates the server's parameters, because
masks protect nothing if one node controls them.
"""

import logging
from collections.abc import Callable

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedssl.errors import RequestRefused
from fedssl.wire.messages import ClientUpdate, TrainPlan
from fedssl.wire.secure_aggregation import MIN_CLIENTS, SECAGG_CONFIG_KEY, SECAGG_PARAMETERS, delta_of

log = logging.getLogger("fedssl")

STATE = "secaggplus_state"  # Flower's name of the record that a client stores between the stages


def is_secure(message: Message) -> bool:
    """Return whether a message belongs to the protocol."""
    return SECAGG_CONFIG_KEY in message.content.config_records


def secagg_reply(
    message: Message, context: Context, train: Callable[[Message, Context], tuple[TrainPlan, ClientUpdate]]
) -> Message:
    """Return the reply to one stage of the protocol. ``train`` is called in the collect stage.

    Raises `RequestRefused` if the server's parameters would reveal more than a sum.
    """
    from client_app.compat import delta_reply, secaggplus_mod  # slow import

    configs = message.content.config_records[SECAGG_CONFIG_KEY]
    _check(configs)
    # A copy, because the mod removes records, and simulated clients share the message.
    message.content = RecordDict({**message.content, SECAGG_CONFIG_KEY: ConfigRecord(dict(configs))})

    def call(message: Message, context: Context) -> Message:
        plan, update = train(message, context)
        delta = delta_of(update.layers, plan.layers)
        # Flower does not type a record's values. Its setup stage wrote this one as a number.
        _check_delta(delta, max_abs=float(context.state.config_records[STATE]["clipping_range"]))  # type: ignore[arg-type]
        return delta_reply(message, delta)

    return secaggplus_mod(message, context, call)


def _check_delta(delta: np.ndarray, *, max_abs: float) -> None:
    """Refuse non-finite values, which would invalidate the sum, and log clipped values."""
    if not np.isfinite(delta).all():
        raise RequestRefused("training diverged: the update has values that are not finite")
    clipped = int(np.count_nonzero(np.abs(delta) > max_abs))
    if clipped:
        log.warning(
            "%d values of the update exceed secure_aggregation.clipping_range=%g and are clipped to it",
            clipped,
            max_abs,
        )


def _check(configs: ConfigRecord) -> None:
    values = dict(configs)
    if values.get("stage") == "setup":
        numbers = [
            value for key in ("sample_num", "share_num", "threshold") if isinstance(value := values.get(key), int)
        ]
        if len(numbers) < 3:
            raise RequestRefused("secure aggregation was proposed without the number of clients")
        clients, shares, threshold = numbers
        if min(clients, shares) < MIN_CLIENTS or not shares < 2 * threshold <= 2 * shares:
            raise RequestRefused(
                f"secure aggregation of {clients} clients with {shares} shares, {threshold} of which reveal a mask, "
                f"was proposed; at least {MIN_CLIENTS} clients and more than half of the shares are needed"
            )
        for key, expected in SECAGG_PARAMETERS.items():
            if values.get(key) != expected:
                raise RequestRefused(
                    f"secure aggregation was proposed with {key}={values.get(key)!r} instead of {expected}"
                )
    if values.get("stage") == "unmask":
        active, dead = values.get("active_nids"), values.get("dead_nids")
        if not (isinstance(active, list) and isinstance(dead, list)) or set(active) & set(dead):
            raise RequestRefused(
                "secure aggregation was asked for both shares of a client, which would reveal its update"
            )
